"""What vLLM does to everybody's log when its API is made. Imports no vLLM."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def as_they_were() -> Iterator[None]:
    """vLLM's `suppress_logging`, which its parser uses, is not undone after an error: nobody could log any more."""
    disabled = logging.root.manager.disable
    try:
        yield
    finally:
        logging.disable(disabled)
