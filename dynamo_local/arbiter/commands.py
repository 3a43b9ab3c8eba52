"""`scale`, `drain` and `restart`, as the arbiter's commands: a stimulus to the shell, and an answer for the caller.

The calls return once the intent is committed. The planner calls the same (`LocalConnector`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dynamo_local.arbiter.controller import Shell, Waiting
from dynamo_local.core.fleet import flipping, scaling
from dynamo_local.core.fleet import restarting as rolling
from dynamo_local.core.fleet.commands import decide_scale, decide_scale_all, decide_sleep, decide_wake
from dynamo_local.core.fleet.events import (
    CalledBack,
    CancelDrain,
    CancelFlip,
    Drain,
    Flip,
    GpuReserved,
    Restart,
    Scale,
    ScaleAll,
    ScaleFlip,
    Sleep,
    Stimulus,
    Wake,
)
from dynamo_local.core.fleet.moves import (
    BeginDrain,
    CallOffFlipOf,
    FlipWorker,
    Move,
    PutToSleep,
    Revive,
    SpawnWorker,
    TakeBack,
    WakeUp,
)
from dynamo_local.core.fleet.moves import CancelDrain as CancelDrainMove
from dynamo_local.core.fleet.scaling import parse_policy
from dynamo_local.core.types import WAKES, Actuator
from dynamo_local.errors import DrainNotCancellable, DynamoError, FlipNotCancellable, NotEnoughGpus, TimedOut
from dynamo_local.system.gpu_pool import GpuSample

T = TypeVar("T")

KINDS: dict[type[Move], str] = {
    SpawnWorker: "spawn",
    Revive: "spawn",
    BeginDrain: "drain",
    CancelDrainMove: "cancel_drain",
    TakeBack: "take_back",
    FlipWorker: "flip",
    CallOffFlipOf: "cancel_flip",
    PutToSleep: "sleep",
    WakeUp: "wake",
}
CALL_BACK_TIMEOUT_S = 10.0
"""A call back is two questions to a worker, each with its own deadline."""


class Orders:
    """Gives commands to the fleet. `look` samples the GPUs, within a deadline of its own."""

    def __init__(self, shell: Shell, look: Callable[[], Awaitable[GpuSample]]) -> None:
        self._shell = shell
        self._look = look
        shell.subscribe(on_event=self._on_event)
        self._answers: dict[str, asyncio.Future[str | None]] = {}
        self._lock_refused: dict[str, bool] = {}
        self.on_manual: list[Callable[[str], None]] = []
        """Called when a person's command has changed something: whoever plans by itself holds still for a while."""

    async def scale(
        self,
        component: str,
        target: str,
        *,
        force: bool = False,
        victim_policy: str | None = None,
        stimulus_id: str,
        by_person: bool = True,
        wait_for_gpus: bool = False,
        wake: bool = True,
        sleep: bool = False,
    ) -> dict[str, Any]:
        """Bring a component to a number of workers; `wake`: those on standby before new ones are started; `sleep`: who
        goes is kept on standby, where the component wants more of those.

        Raises the refusals of `core.fleet.scaling.decide`.
        """
        order = Scale(
            stimulus_id=stimulus_id,
            component=component,
            change=scaling.parse_target(target),
            force=force,
            victim_policy=parse_policy(victim_policy),
            by_person=by_person,
            wait_for_gpus=wait_for_gpus,
            wake=wake,
            sleep=sleep,
        )
        moves = await self._on_a_fresh_look(order, lambda: decide_scale(self._shell.fleet, order))
        self.changed(moves, stimulus_id, by_person)
        return self._answer(component, moves)

    async def scale_all(
        self,
        targets: Mapping[str, int],
        *,
        victim_policy: str | None = None,
        actuators: frozenset[Actuator] = WAKES,
        stimulus_id: str,
    ) -> dict[str, dict[str, Any]]:
        """Bring several components to their numbers of workers, in one commit, as a planner: it never forces, and an up
        may wait for the GPUs of workers that leave. The answer of `scale` for each of them; a flip is in both.

        Raises the refusals of `core.fleet.scaling.decide`; then nothing is changed.
        """
        order = ScaleAll(
            stimulus_id=stimulus_id, targets=targets, victim_policy=parse_policy(victim_policy), actuators=actuators
        )
        made = await self._on_a_fresh_look(order, lambda: decide_scale_all(self._shell.fleet, order))
        return {component: self._answer(component, moves) for component, moves in made.items()}

    def _answer(self, component: str, moves: Iterable[Move]) -> dict[str, Any]:
        fleet = self._shell.fleet
        return {
            "component": component,
            "instructions": as_json(moves),
            "ready": len(fleet.ready(component)),
            "target": fleet.capacity(component),
        }

    async def drain(self, name: str, *, cancel: bool = False, force: bool = False, stimulus_id: str) -> dict[str, Any]:
        """Drain a worker, or take its drain back (then the answer comes when it has registered again).

        `name` may be without the namespace; the answer has the whole one.
        """
        name = self._whole(name)
        if cancel:
            return self._of_one(name, await self._cancel(name, stimulus_id))
        order = Drain(stimulus_id=stimulus_id, name=name, force=force)
        moves = scaling.decide_drain(self._shell.fleet, name, stimulus_id=stimulus_id, force=force).or_raise()
        await self.committed(order)
        self.changed(moves, stimulus_id, True)
        return self._of_one(name, moves)

    async def sleep(self, name: str, *, level: int, force: bool, stimulus_id: str) -> dict[str, Any]:
        """Put a worker to sleep. Raises the refusals of `core.fleet.commands.decide_sleep`."""
        order = Sleep(stimulus_id=stimulus_id, name=self._whole(name), level=level, force=force)
        moves = await self._on_a_fresh_look(order, lambda: decide_sleep(self._shell.fleet, order))
        self.changed(moves, stimulus_id, True)
        return self._of_one(order.name, moves)

    async def wake(self, name: str, *, stimulus_id: str) -> dict[str, Any]:
        """Wake a worker. Raises the refusals of `core.fleet.commands.decide_wake`."""
        order = Wake(stimulus_id=stimulus_id, name=self._whole(name))
        moves = await self._on_a_fresh_look(order, lambda: decide_wake(self._shell.fleet, order))
        self.changed(moves, stimulus_id, True)
        return self._of_one(order.name, moves)

    def _whole(self, name: str) -> str:
        found = self._shell.fleet.find(name)
        return name if found is None else found.name

    def _of_one(self, name: str, moves: Sequence[Move]) -> dict[str, Any]:
        worker = self._shell.fleet.workers.get(name)
        state = "removed" if worker is None else str(worker.state)
        return {"watcher_name": name, "state": state, "instructions": as_json(moves)}

    async def restart(
        self, target: str, *, rolling_: bool = False, force: bool = False, stimulus_id: str
    ) -> dict[str, Any]:
        """Drain one worker, start it with the configuration of now, then the next. See `rolling` for the only one,
        which needs GPUs for its substitute."""
        order = Restart(stimulus_id=stimulus_id, target=target, force=force)
        plan = await self._on_a_fresh_look(
            order, lambda: rolling.plan_restart(self._shell.fleet, target, stimulus_id=stimulus_id, force=force)
        )
        for told in self.on_manual:
            told(stimulus_id)
        substitutes = {
            old: new
            for each in self._shell.fleet.restarts
            if each.stimulus_id == stimulus_id
            for old, new in each.substitutes.items()
        }
        names = [name for name, _ in plan.todo]
        return {"workers": names, "substitutes": substitutes, "warnings": list(plan.warnings)}

    async def _on_a_fresh_look(self, order: Stimulus, decide: Callable[[], T]) -> T:
        """What is decided, which is carried out on a fresh look at the GPUs, and on one more where a device's lock was
        refused in between.

        Whoever only asks who holds a lock has it for an instant, and nobody waits for that on the event loop: the
        second look shows whether it was such a one.
        """
        cause = order.stimulus_id
        for last in (False, True):
            await self.refresh_gpus(cause)
            decided = decide()
            self._lock_refused[cause] = False
            try:
                await self.committed(order)
                break
            except NotEnoughGpus:
                if last or not self._lock_refused[cause]:
                    raise
            finally:
                del self._lock_refused[cause]
        return decided

    async def _cancel(self, name: str, stimulus_id: str) -> tuple[Move, ...]:
        """A person waits for the answer. Raises `DrainNotCancellable` with what the worker says where it is no."""
        moves = scaling.decide_cancel(self._shell.fleet, name, stimulus_id=stimulus_id).or_raise()
        asked = any(isinstance(move, CancelDrainMove) for move in moves)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if asked:
            self._answers[stimulus_id] = answer
        try:
            await self.committed(CancelDrain(stimulus_id=stimulus_id, name=name))
            self.changed(moves, stimulus_id, True)
            error = await self._refusal(answer) if asked else None
        finally:
            self._answers.pop(stimulus_id, None)
        if error is not None:
            raise DrainNotCancellable(f"the drain of {name} could not be taken back: {error}")
        return moves

    async def _refusal(self, answer: asyncio.Future[str | None]) -> str | None:
        """Why the worker cannot take its drain back; None where it has."""
        try:
            async with asyncio.timeout(CALL_BACK_TIMEOUT_S):
                return await answer
        except TimeoutError:
            return f"it did not answer within {CALL_BACK_TIMEOUT_S:g} s; if it hears of it later, it stays"

    def _on_event(self, stimulus: Stimulus) -> None:
        """A worker's answer goes to the command that waits for it."""
        if isinstance(stimulus, GpuReserved) and stimulus.stimulus_id in self._lock_refused:
            self._lock_refused[stimulus.stimulus_id] = True
        if isinstance(stimulus, CalledBack):
            answer = self._answers.pop(stimulus.asked_by or "", None)
            if answer is not None and not answer.done():
                answer.set_result(stimulus.error)

    async def refresh_gpus(self, stimulus_id: str) -> None:
        """Let the fleet know how the devices are now."""
        self._shell.feed((await self._look()).seen(stimulus_id))

    async def committed(self, order: Stimulus, then: Callable[[], None] = lambda: None) -> None:
        """Feed it, and return once its intent is written. Raises its refusal.

        `then` is called where it is not refused, before anything is written or done.
        """
        if self._shell.stopped:
            raise DynamoError("the graph is leaving; nothing can be changed now, see `dynamo status`")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not written.done():
                written.set_result(None)

        self._shell.feed(order, committed=done)
        then()
        await written

    def changed(self, moves: Iterable[Move], stimulus_id: str, by_person: bool = True) -> None:
        """A command has begun these moves: whoever plans by itself is told of a person's."""
        if by_person and tuple(moves):
            for told in self.on_manual:
                told(stimulus_id)


def as_json(moves: Iterable[Move]) -> list[dict[str, str]]:
    """What is done to which worker, and why, as a command's answer has it."""
    return [{"kind": KINDS[type(move)], "watcher_name": move.name, "reason": move.reason} for move in moves]


# --- flips
# `flip`, `flip --cancel` and `scale … --flip`, as the arbiter's commands.

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
