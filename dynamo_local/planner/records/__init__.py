"""The records of each decision: the decision log, the tick log, and the figures for metrics."""
