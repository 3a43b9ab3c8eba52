"""The processes of an engine: started by vLLM or by the launcher, watched by the worker, and ended with it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_local.engines.vllm import launcher
from dynamo_local.engines.vllm.engine_resources import unpin
from dynamo_local.errors import EngineError


class CoreProcesses:
    """The processes of one engine. The worker's loop thread calls all methods except `launch` and `shutdown`."""

    def __init__(self) -> None:
        self._launcher: launcher.CoreLauncher | None = None
        self._watches: list[tuple[asyncio.AbstractEventLoop, int]] = []
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()

    async def build(self, build: Callable[[], Any]) -> Any:
        """Run `build` in a thread and return its result.

        Raises `EngineError` if the EngineCore that `launch` started ends first: `build` would wait for minutes.
        """
        building = asyncio.ensure_future(asyncio.to_thread(build))
        await asyncio.wait({building, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            raise EngineError(f"vLLM did not start: {self._failed.result()}; see above")
        await asyncio.to_thread(unpin, [pid for pid, _ in self._pids()])
        return building.result()

    def launch(self, config: Any, folder: Path) -> dict[str, str] | None:
        """Have EngineCore started by this process's launcher, if it has one: what `AsyncLLM` takes as
        `client_addresses`. None: vLLM is to start it. Called in the thread of `build`."""
        launched = launcher.take(config)
        if launched is None:
            return None
        from vllm.v1.executor import Executor

        addresses = launched.launch(config, Executor.get_class(config), folder)
        self._launcher = launched
        launched.watch(self._heard)
        return addresses

    def _heard(self, why: str) -> None:
        """In a thread of the launcher's."""
        self._loop.call_soon_threadsafe(self._fail, why)

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why)

    def watch(self, die: Callable[[str], None]) -> None:
        """Call `die` with the reason as soon as one of them ends."""
        for pid, name in self._pids():
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                die(f"{name} ended during the start")
                continue
            self._watches.append((self._loop, fd))
            self._loop.add_reader(fd, die, f"its process {name} (pid {pid}) ended")
        if not self._watches:
            die("none of its processes is there after the start")

    def _pids(self) -> list[tuple[int, str]]:
        children = [(child.pid, child.name) for child in multiprocessing.active_children() if child.pid is not None]
        if self._launcher is not None:
            children.append((self._launcher.pid, "EngineCore launcher"))
            children += [(pid, "EngineCore") for pid in self._launcher.core_pids]
        return children

    def watch_no_more(self) -> None:
        """The pidfd of a dead process stays readable."""
        for loop, fd in self._watches:
            loop.remove_reader(fd)
            os.close(fd)
        self._watches.clear()

    def shutdown(self, llm: Any, timeout_s: float) -> None:
        """End the engine. Blocks."""
        if self._launcher is not None:
            self._launcher.end(timeout_s)
        llm.shutdown(timeout_s)
