"""Starts processes for the shell: of a spare where one fits, else anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dynamo_local.control.spares.kinds import Kind
from dynamo_local.control.spares.pool import Spares
from dynamo_local.system.process_host import ExitCallback, ProcessHost, ProcessSpec

REMEMBERED = 1024


class SparedHost:
    """A `ProcessHost` before another one. `kind_of` says of which kind of spare a worker of that name can be made."""

    def __init__(self, host: ProcessHost, spares: Spares | None, kind_of: Callable[[str], Kind | None]) -> None:
        self._host = host
        self._spares = spares
        self._kind_of = kind_of
        self._warm: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def on_exit(self) -> ExitCallback | None:
        """Who hears of exits: of this host and of the other one alike."""
        return self._host.on_exit

    @on_exit.setter
    def on_exit(self, callback: ExitCallback | None) -> None:
        """Hear of exits."""
        self._host.on_exit = callback

    async def start_process(self, spec: ProcessSpec) -> int:
        """See `ProcessHost`."""
        kind = None if self._spares is None else self._kind_of(spec.name)
        if self._spares is not None and kind is not None:
            pid = await self._spares.become(spec, kind)
            if pid is not None:
                self._warm.append(pid)
                return pid
        return await self._host.start_process(spec)

    async def forget(self, name: str) -> None:
        """See `ProcessHost`."""
        await self._host.forget(name)

    def rename(self, was: str, name: str, pid: int) -> None:
        """See `ProcessHost`."""
        self._host.rename(was, name, pid)

    def was_spare(self, pid: int | None) -> bool:
        """Whether that process was a spare before it became a worker."""
        return pid in self._warm
