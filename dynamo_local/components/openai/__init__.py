"""The Frontend's HTTP side: OpenAI's API over the Processor."""
