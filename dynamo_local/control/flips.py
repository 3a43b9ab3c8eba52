"""`flip`, `flip --cancel` and `scale … --flip`, as the arbiter's commands."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_local.control.orders import Orders, as_json
from dynamo_local.control.shell import Shell
from dynamo_local.control.waiting import Waiting
from dynamo_local.core.life import flipping
from dynamo_local.core.life.decisions.moves import FlipWorker, Move
from dynamo_local.core.life.decisions.victims import parse_policy
from dynamo_local.core.life.stimuli import CancelFlip, Flip, ScaleFlip
from dynamo_local.errors import FlipNotCancellable, TimedOut

CANCEL_TIMEOUT_S = 20.0
"""A flip is over within its own deadline, whatever becomes of it."""


class FlipOrders:
    """Gives them to the fleet. The calls return once the intent is committed; a cancel, when the flip is over."""

    def __init__(self, shell: Shell, orders: Orders, waiting: Waiting) -> None:
        self._shell = shell
        self._orders = orders
        self._waiting = waiting

    async def flip(self, name: str, *, force: bool = False, stimulus_id: str) -> dict[str, Any]:
        """`{"watcher_name", "becomes", "component", "state", "instructions"}`. Raises what `flips.decide` refuses."""
        name = self._whole(name)
        moves = await self._commit(Flip(stimulus_id=stimulus_id, name=name, force=force))
        worker = self._shell.fleet.workers.get(name)
        target = None if worker is None else worker.flip
        return {
            "watcher_name": name,
            "becomes": None if target is None else target.name,
            "component": None if target is None else target.component,
            "state": "removed" if worker is None else str(worker.state),
            "instructions": _told(moves),
        }

    async def scale(
        self, gives: str, takes: str, count: int, *, force: bool, victim_policy: str | None, stimulus_id: str
    ) -> dict[str, Any]:
        """`{"components": {name: {"ready", "target"}}, "instructions"}`. Raises what `flips.decide_scale` refuses."""
        order = ScaleFlip(
            stimulus_id=stimulus_id,
            gives=gives,
            takes=takes,
            count=count,
            force=force,
            victim_policy=parse_policy(victim_policy),
        )
        moves, fleet = await self._commit(order), self._shell.fleet
        numbers = {each: {"ready": len(fleet.ready(each)), "target": fleet.capacity(each)} for each in (gives, takes)}
        return {"components": numbers, "instructions": _told(moves)}

    async def cancel(self, name: str, *, stimulus_id: str) -> dict[str, Any]:
        """Returns when the worker has stayed what it was. Raises `FlipNotCancellable` where that came too late."""
        name = self._whole(name)
        worker = self._shell.fleet.worker(name)
        moves = await self._commit(CancelFlip(stimulus_id=stimulus_id, name=name))
        deadline_s = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_S

        def over() -> bool:
            now = self._shell.fleet.workers.get(name)
            return now is None or now.flip is None or now.pid != worker.pid

        if not await self._waiting.until(over, deadline_s):
            raise TimedOut(f"{name} has not answered within {CANCEL_TIMEOUT_S:g} s; it goes on, see `dynamo status`")
        now = self._shell.fleet.workers.get(name)
        if now is None or now.pid != worker.pid:
            became = next((w.name for w in self._shell.fleet.workers.values() if w.pid == worker.pid), "gone")
            raise FlipNotCancellable(
                f"the flip of {name} was taken back too late: it is {became} now; `dynamo flip {became}` flips it back"
            )
        return {"watcher_name": name, "becomes": None, "state": str(now.state), "instructions": _told(moves)}

    def _whole(self, name: str) -> str:
        found = self._shell.fleet.find(name)
        return name if found is None else found.name

    async def _commit(self, order: Flip | ScaleFlip | CancelFlip) -> tuple[Move, ...]:
        moves = flipping.decided(self._shell.fleet, order)
        await self._orders.committed(order)
        self._orders.changed(moves, order.stimulus_id)
        return moves


def _told(moves: tuple[Move, ...]) -> list[dict[str, str]]:
    told = as_json(moves)
    for each, move in zip(told, moves, strict=True):
        if isinstance(move, FlipWorker):
            each["becomes"] = move.to
    return told
