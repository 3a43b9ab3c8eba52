"""The tokenizer that ships, for the simulated engine and tests."""
