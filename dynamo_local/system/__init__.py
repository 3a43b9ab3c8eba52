"""The host, for every process: processes, GPUs, locks, paths, files and logs."""
