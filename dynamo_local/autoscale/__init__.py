"""The planner, joined to the arbiter."""
