"""Components that run in another one's process."""
