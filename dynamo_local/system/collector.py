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
"""Python looks for garbage each time so many values more have been made than freed; by itself after 700, which is seven
requests of a Frontend: with hundreds under way it finds them all alive, again and again."""


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
    """`paused`, and what there is at the end of the block stays for the process's life: it is not walked through again.

    For an entry point's own imports, before it loads anything of a user: Python's last collection is also what closes a
    file that a module of a graph has left open, and that must still find it.
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
