"""Commands that show."""
