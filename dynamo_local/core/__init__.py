"""Pure values and decisions, used in every process. Nothing here reads a clock, does I/O or logs."""
