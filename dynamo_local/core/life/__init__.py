"""The life of a worker, and of a fleet of them."""
