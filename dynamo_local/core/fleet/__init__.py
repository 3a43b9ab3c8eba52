"""The machine of a worker's life. Pure: `step.step(fleet, event, now_s)` returns the next fleet and its effects."""
