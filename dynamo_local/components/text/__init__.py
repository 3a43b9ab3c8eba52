"""Text to tokens and tokens to text."""
