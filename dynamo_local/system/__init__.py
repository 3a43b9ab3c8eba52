"""What Linux is asked for: processes, paths, locks, logs, leases of ports."""
