"""Seed 002's planner: forecast, profile, correction factors, and the number of engines that keep the targets."""
