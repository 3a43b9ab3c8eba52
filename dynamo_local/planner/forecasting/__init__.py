"""What runs a `ForecastTask` where it holds nobody up: `planner.sources.Forecaster`, and the process behind it."""
