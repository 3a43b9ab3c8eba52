"""How a simulated worker process changes its role: in the order of `worker.flip`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynamo_local.core.types import lease_hex
from dynamo_local.errors import DynamoError, EtcdUnavailable, FlipFailed, FlipUnderWay
from dynamo_local.transport.control import ControlServer
from dynamo_local.transport.lease import LeaseKeeper
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.process import EntryWriter

if TYPE_CHECKING:
    from tests.simulation.world import World


class RoleChanges:
    """A part of `SimProcess`, which has all that is named here."""

    world: World
    pid: int
    name: str
    component: str
    drain: Drain
    lease_id: Any
    _go: asyncio.Event
    _entry: EntryWriter
    _lease: LeaseKeeper | None
    _leases: list[LeaseKeeper]
    _control: ControlServer | None
    _flipping: asyncio.Task[None] | None
    _becomes: str
    _past: bool
    _lease_gone: bool
    _registered: bool
    _answer: Any
    _granted: Any
    _endpoints: Any
    _ready_value: Any
    _keys_of: Any
    _endpoint_of: Any
    _spawn: Any

    async def _op_flip(self, args: Mapping[str, Any]) -> dict[str, Any]:
        to, component = args["to"], args["component"]
        task = self._flipping
        if task is not None and not task.done():
            if self._becomes != to:
                raise FlipUnderWay(f"it becomes {self._becomes}")
        elif self.name != to:
            self._becomes, self._past = to, False
            task = self._flipping = asyncio.ensure_future(self._flip(to, component))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if task is not None and self._becomes == to:
            await asyncio.wait({task})
            if task.cancelled():
                raise FlipFailed("it was taken back")
            if (error := task.exception()) is not None:
                raise error
        held = lease_hex(self.lease_id) if self.lease_id else None
        return {
            "pid": self.pid,
            "watcher_name": self.name,
            "lease": held,
            "endpoints": self._endpoints(self.lease_id) if held and self._registered else [],
        }

    async def _op_cancel_flip(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        await self._stay()
        return {}

    async def _stay(self) -> None:
        """No flip goes on when this returns: it is undone, or over."""
        task = self._flipping
        if task is not None and not task.done():
            if not self._past:
                task.cancel()
            await asyncio.wait({task})

    async def _flip(self, to: str, component: str) -> None:
        """The order of `worker.flip`: all that can fail comes before the new ready key."""
        if self.drain.phase is not Phase.READY or self.world.flips_fail:
            raise FlipFailed(f"it is {self.drain.phase}, or its canary dies")
        old_control, old_lease, kept = self._control, self._lease, len(self._leases)
        control = await self._answer(to)
        before = self.name, self.component
        try:
            async with asyncio.timeout(10.0):
                lease = await self._granted(to)
                await asyncio.sleep(self.world.flip_s)
                await self._go.wait()
                await lease.register(self._endpoint_of(component), lambda _lease: b"{}")
            self._past = True
            self.component = component
            await self._say_so(to, lease)
        except BaseException as error:
            self.component = before[1]
            for each in self._leases[kept:]:
                await asyncio.shield(each.close())
            await asyncio.shield(control.close())
            if isinstance(error, DynamoError | TimeoutError):
                raise FlipFailed(str(error)) from error
            raise
        self.name, self._lease, self._lease_gone, self._control = to, lease, False, control
        self.world.note(f"{before[0]} ({self.pid}) is {to} now")
        self._entry.renamed(to)
        self._spawn(self._give_up(old_lease, old_control))

    async def _say_so(self, to: str, lease: LeaseKeeper) -> None:
        """There is no way back any more: the key may have been put, and seen, whatever is heard of it."""
        while True:
            await self._entry.flush(0.5)
            try:
                return await lease.register(self._keys_of(to)[1], self._ready_value)
            except EtcdUnavailable:
                continue

    async def _give_up(self, lease: LeaseKeeper | None, control: ControlServer | None) -> None:
        if control is not None:
            await control.close()
        while lease is not None:
            try:
                await lease.revoke(5.0)
                return
            except EtcdUnavailable:
                await asyncio.sleep(0.2)
