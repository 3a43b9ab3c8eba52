"""What others may see: metrics, events, scalars, progress."""
