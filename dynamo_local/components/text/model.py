"""Which model a service serves: names and paths only, so that a worker need not load a tokenizer to say them."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.core import prewarmed

TINY_MODEL = prewarmed.TINY_MODEL

TINY_FOLDER = Path(__file__).parent / "tiny_tokenizer"

TINY_TOKENS = (259, 2048)
"""Ids of the built-in tokenizer that are plain text: behind 3 special tokens and the 256 single bytes."""
