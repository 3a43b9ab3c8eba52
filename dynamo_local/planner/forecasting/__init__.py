"""What runs a `ForecastTask` where it holds nobody up: `runners.Forecaster`, and the process behind it."""
