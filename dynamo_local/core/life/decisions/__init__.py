"""Decisions about workers: a fleet in, moves or a typed refusal out."""
