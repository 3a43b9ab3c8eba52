"""How long anything may be told to take. Past a year a number is a typing error, and some clocks overflow."""

SECONDS_MAX = 365 * 24 * 3600.0
