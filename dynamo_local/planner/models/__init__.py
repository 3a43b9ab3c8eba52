"""How long an engine's pass takes, learned from passes; and what follows from it: TTFT, ITL, capacity. Pure."""
