"""Who carries the instructions out in the arbiter: on real processes, locks, leases and files."""
