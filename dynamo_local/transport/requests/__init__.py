"""Requests between components: over NATS there, over a loopback TCP connection back. See `frames` for the wire."""
