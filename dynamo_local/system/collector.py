"""Python's garbage collector, kept away from where it finds nothing.

While a process imports its modules, hundreds of thousands of values are made and next to nothing becomes garbage. Yet
the collector walks through all of them again and again, and once more when the process ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
