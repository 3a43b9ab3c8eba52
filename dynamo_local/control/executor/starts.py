"""Processes are made within a deadline. One that appears after it is ended: somebody else may be started meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
"""To make a process takes milliseconds, on a busy host a second. When it is ready is another matter."""


class Starts:
    """`end_session` ends what appeared too late, `run` keeps a task until it has ended, `tell` tells a person."""

    def __init__(
        self,
        end_session: Callable[[int], Awaitable[None]],
        run: Callable[[Coroutine[Any, Any, None], str], object],
        tell: Callable[[str], None],
    ) -> None:
        self._end_session = end_session
        self._run = run
        self._tell = tell
        self._late: dict[str, asyncio.Future[int]] = {}

    async def within_deadline(self, name: str, making: Coroutine[Any, Any, int]) -> int:
        """The pid of the process that `making` makes for that worker. Raises what that raises, and OSError at the
        deadline. None is made while an earlier one may still appear, nor right after that: its GPUs are looked at
        first."""
        if (late := self._late.get(name)) is not None:
            making.close()
            await asyncio.wait({late}, timeout=START_DEADLINE_S)
            raise OSError(f"an earlier start of it had not come back within {START_DEADLINE_S:g} s")
        process = asyncio.ensure_future(making)
        try:
            await asyncio.wait({process}, timeout=START_DEADLINE_S)
        except asyncio.CancelledError:
            process.cancel()
            raise
        if process.done():
            return process.result()
        self._late[name] = process
        self._run(self._end_late(name, process), f"end of a late start of {name}")
        raise OSError(f"its process was not there within {START_DEADLINE_S:g} s; should it appear now, it is ended")

    async def _end_late(self, name: str, process: asyncio.Future[int]) -> None:
        try:
            pid = await process
        except Exception as error:
            log.warning("%s: its late start has failed: %s", name, error)
        else:
            self._tell(f"{name}: its process {pid} appeared more than {START_DEADLINE_S:g} s late; it is ended")
            await self._end_session(pid)
        finally:
            del self._late[name]
