"""Ending tasks for good."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""What a task still does once it was cancelled (giving back an entry of the queue) takes some milliseconds."""


async def ended(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel these tasks, and return when they have ended; what they raise is not. None stands for no task.

    One cancellation may not be enough: Python 3.11's `asyncio.wait_for`, which nats-py calls, drops one that comes
    together with what was waited for, and nats-py's `publish` drops any while it waits for its buffer. A loop around
    such a call would go on for ever, and whoever waits for its end with it. So it is cancelled again.
    """
    given = [task for task in tasks if task is not None]
    left = {task for task in given if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in left:
            log.warning("%r has not ended %g s after it was cancelled; cancelled again", task, AGAIN_S)
    for task in given:
        if not task.cancelled():
            task.exception()  # seen: asyncio would log it as never retrieved
