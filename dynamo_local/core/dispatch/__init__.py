"""Where a request goes, decided by what it will cost: expected misses of TTFT and ITL targets, estimated from the
engine's profile and corrected by what is seen. Pure: time, loads and profile are arguments."""
