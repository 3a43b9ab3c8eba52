"""Pure decisions: values in, values out. No clock, no I/O, no logging (import-linter enforces it)."""
