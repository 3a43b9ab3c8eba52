"""Requests that ask for more than text, and the other APIs that are answered by the same way."""
