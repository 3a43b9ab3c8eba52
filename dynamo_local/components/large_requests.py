"""Where a large request is parsed, rendered and tokenised: in one thread beside the event loop, which carries
everybody's tokens. One after the other, so that several large requests take no more of the loop's time than one."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from dynamo_local.components.limits import LARGE_BYTES
from dynamo_local.system.executors import DaemonExecutor

P = ParamSpec("P")
T = TypeVar("T")

TRIM_BYTES: Final = 4 * LARGE_BYTES
"""After a request of this size young garbage is collected and the C library is asked to give free memory back. By
itself the first may be late for want of values to count (`system.collector.serving`): an error and the frames that it
came through, of which one has the body, hold each other. The second keeps what lies below anything that is still used,
up to a hundred megabytes after a few bodies of eight."""

TRIM_AFTER_S: Final = 1.0
"""By then what was made of the request is gone, too."""

_LARGE: Final = DaemonExecutor("large request", threads=1)
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc's; others need none


async def run_beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` in the thread, whatever its size: for what costs more than is seen from that."""
    return await asyncio.get_running_loop().run_in_executor(_LARGE, lambda: work(*args, **kwargs))


async def run_by_size(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`: at once for what is small (bytes or characters), in the thread for what is not."""
    if size <= LARGE_BYTES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_LARGE, lambda: work(*args, **kwargs))
    finally:
        if size >= TRIM_BYTES:
            loop.call_later(TRIM_AFTER_S, _give_back)


def _give_back() -> None:
    gc.collect(1)  # on the loop, where what it finds belongs; young values only
    _LARGE.submit(_malloc_trim, 0)
