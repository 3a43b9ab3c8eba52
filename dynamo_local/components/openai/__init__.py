"""OpenAI's HTTP API: requests, responses, errors, and the ASGI application that the Frontend serves."""
