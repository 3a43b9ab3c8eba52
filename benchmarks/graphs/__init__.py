"""Graphs that only benchmarks serve."""
