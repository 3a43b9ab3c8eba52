"""How much memory a piece of Python takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

RUNS = 3


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that Python's allocators held at once for `work()`, in bytes: the least of three runs, because threads
    that other tests left allocate as well."""
    return min(_peak(work) for _ in range(RUNS))


def _peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
