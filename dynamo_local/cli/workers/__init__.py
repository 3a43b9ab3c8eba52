"""Commands that change workers."""
