"""vLLM's own API layer inside a Processor, and the Frontend's way to it."""
