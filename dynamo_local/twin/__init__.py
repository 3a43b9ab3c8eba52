"""The twin: a graph's engine, queue, routing and planner on a virtual clock, without processes. docs/simulate.md."""
