"""What takes time when the twin's workers start, change their role, sleep or wake."""
