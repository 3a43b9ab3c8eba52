"""What the host offers: processes, GPUs, locks, paths, files and logs."""
