"""The simulated engine's answers to tools, schemas, Responses and Messages requests."""
