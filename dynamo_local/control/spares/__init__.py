"""Spares: processes with an engine's modules imported, of which workers are made in a fraction of a start's time."""
