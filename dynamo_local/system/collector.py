"""Python's garbage collector, kept away from where it finds nothing.

While a process imports its modules, hundreds of thousands of values are made and next to nothing becomes garbage. Yet
the collector walks through all of them again and again, and once more when the process ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG_VALUES: Final = 10_000
"""Allocations beyond frees that trigger a collection. Python's default of 700 is seven requests of a Frontend. With
hundreds of requests under way, each such collection would find them all alive."""


@contextmanager
def paused() -> Iterator[None]:
    """Within the block nothing is collected; afterwards the collector is on if it was before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def keeping() -> Iterator[None]:
    """Like `paused`. Objects that exist at the end of the block are never traversed again.

    For an entry point's own imports, before it loads a user's code. Python's last collection closes files that a
    graph's module left open, so it must still see the user's objects.
    """
    with paused():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def serving() -> Iterator[None]:
    """For as long as a process serves: what it has loaded by now is not walked through, and what it makes less often.
    At the end of the block all is found again."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_VALUES, *before[1:])
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
