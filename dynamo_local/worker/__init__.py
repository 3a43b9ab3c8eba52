"""A worker's process: its start, its roles, its drain, flip and sleep."""
