"""Decisions about KV blocks: who has which, and who should be asked."""
