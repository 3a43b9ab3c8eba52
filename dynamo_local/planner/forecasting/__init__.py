"""The process that computes forecasts, so that fits never hold the arbiter."""
