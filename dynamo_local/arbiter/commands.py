"""The arbiter's commands: a record of `core.fleet.events` goes to the controller, and the caller gets an answer.

`Commands.run` returns once the intent is committed. People's commands and the planner's take this same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_local.arbiter.controller import FleetController, Waiting
from dynamo_local.core.fleet.events import (
    CalledBack,
    Command,
    Drain,
    Event,
    Flip,
    GpuReserved,
    Restart,
    Scale,
    ScaleAll,
    ScaleFlip,
    Sleep,
    Wake,
)
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.moves import Answer, Move, MoveKind
from dynamo_local.errors import DrainNotCancellable, DynamoError, FlipNotCancellable, NotEnoughGpus, TimedOut
from dynamo_local.system.gpu_pool import GpuSample

CALL_BACK_TIMEOUT_S = 10.0
"""A call back is two questions to a worker, each with its own deadline."""
CANCEL_TIMEOUT_S = 20.0
"""A flip is over within its own deadline, whatever becomes of it."""
NEED_GPUS = (Scale, ScaleAll, Sleep, Wake, Restart)
"""Commands that may take devices: the GPUs are sampled before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyDeployment(Command):
    """`dynamo apply -f FILE`. `arbiter.apply` makes an `Apply` of it, which `step` takes."""

    #: As `arbiter.deployment_spec` writes it.
    deployment: Any
    dry_run: bool = False
    force: bool = False


class Commands:
    """Gives commands to the fleet. `look` samples the GPUs, within a deadline of its own.

    `on_manual` is called with the cause when a person's command has changed something: a planner then pauses.
    """

    def __init__(
        self,
        controller: FleetController,
        look: Callable[[], Awaitable[GpuSample]],
        waiting: Waiting | None = None,
        on_manual: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._controller = controller
        self._look = look
        self._waiting = waiting
        controller.subscribe(on_event=self._on_event)
        self._call_backs: dict[str, asyncio.Future[str | None]] = {}
        self._lock_refused: dict[str, bool] = {}
        self._on_manual = on_manual

    async def run(self, command: Command) -> dict[str, Any]:
        """Carry the command out, and answer once its intent is committed. Raises its refusal.

        The cancel of a drain or of a flip is answered when the worker has answered it.
        """
        match command:
            case Drain(cancel=True):
                return await self._cancel_drain(command)
            case Flip(cancel=True):
                return await self._cancel_flip(command)
            case Drain() | Sleep() | Wake() | Flip() | Scale() | Restart():
                before = self._controller.fleet
                answer = await self._carried_out(command)
                return self._answered(command, answer, before, self._controller.fleet)
            case ScaleAll():
                answer = await self._carried_out(command)
                return {each: self._of_component(each, moves) for each, moves in answer.by_component.items()}
            case ScaleFlip():
                answer = await self._carried_out(command)
                fleet, both = self._controller.fleet, (command.gives, command.takes)
                numbers = {each: {"ready": len(fleet.ready(each)), "target": fleet.capacity(each)} for each in both}
                return {"components": numbers, "instructions": as_json(answer.moves)}
        raise TypeError(f"{command.kind} is not answered here")

    async def would(self, command: Command) -> dict[str, Any]:
        """The answer that the command would get now. Nothing is changed. Raises its refusal."""
        if isinstance(command, NEED_GPUS):
            await self.refresh_gpus(command.stimulus_id)
        after, answer = self._controller.would(command)
        return self._answered(command, answer, self._controller.fleet, after)

    def _answered(self, command: Command, answer: Answer, before: Fleet, after: Fleet) -> dict[str, Any]:
        """The answer's words. A worker is named as `before` knows it: it may be gone, or renamed, in `after`."""
        match command:
            case Scale():
                return self._of_component(command.component, answer.moves, after)
            case Drain() | Sleep() | Wake() | Flip():
                found = before.find(command.name)
                name = command.name if found is None else found.name
                return self._of_one(name, answer.moves, after, flips=isinstance(command, Flip))
            case Restart():
                return self._of_plan(command, answer)
        raise DynamoError(f"{command.kind} has no dry run")

    async def _carried_out(self, command: Command) -> Answer:
        looks = isinstance(command, NEED_GPUS)
        answer = await (self._on_a_fresh_look(command) if looks else self.committed(command))
        by_planner = isinstance(command, ScaleAll) or (isinstance(command, Scale) and not command.by_person)
        if (answer.moves or answer.plan) and not by_planner:
            self.changed(command)
        return answer

    # --- answers ---------------------------------------------------------------------------------

    def _of_component(self, component: str, moves: Iterable[Move], fleet: Fleet | None = None) -> dict[str, Any]:
        now = self._controller.fleet
        return {
            "component": component,
            "instructions": as_json(moves),
            "ready": len(now.ready(component)),
            "target": (fleet or now).capacity(component),
        }

    def _of_one(self, name: str, moves: Sequence[Move], fleet: Fleet, *, flips: bool = False) -> dict[str, Any]:
        worker = fleet.workers.get(name)
        answer: dict[str, Any] = {"watcher_name": name, "state": "removed" if worker is None else str(worker.state)}
        if flips:
            target = None if worker is None else worker.flip
            answer["becomes"] = None if target is None else target.name
            answer["component"] = None if target is None else target.component
        return {**answer, "instructions": as_json(moves)}

    def _of_plan(self, command: Restart, answer: Answer) -> dict[str, Any]:
        assert answer.plan is not None
        restarts = self._controller.fleet.restarts
        now = next((each for each in restarts if each.stimulus_id == command.stimulus_id), None)
        return {
            "workers": [name for name, _ in answer.plan.todo],
            "substitutes": {} if now is None else dict(now.substitutes),
            "warnings": list(answer.plan.warnings),
        }

    # --- committing --------------------------------------------------------------------------------

    async def _on_a_fresh_look(self, command: Command) -> Answer:
        """Sample the GPUs, then carry the command out. Once more if a device's lock was refused in between.

        Asking for the holder of a lock takes the lock for an instant. The event loop does not wait for that: the second
        look shows whether it was only such a question.
        """
        cause = command.stimulus_id
        for last in (False, True):
            await self.refresh_gpus(cause)
            self._lock_refused[cause] = False
            try:
                return await self.committed(command)
            except NotEnoughGpus:
                if last or not self._lock_refused[cause]:
                    raise
            finally:
                del self._lock_refused[cause]
        raise AssertionError("the last try returns or raises")

    async def refresh_gpus(self, stimulus_id: str) -> None:
        """Let the fleet know how the devices are now."""
        self._controller.feed((await self._look()).seen(stimulus_id))

    async def committed(self, command: Command, then: Callable[[], None] = lambda: None) -> Answer:
        """Feed the command, and return its answer once its intent is written. Raises its refusal.

        `then` is called if it is not refused, before anything is written or done.
        """
        if self._controller.stopped:
            raise DynamoError("the graph is leaving; nothing can be changed now, see `dynamo status`")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not written.done():
                written.set_result(None)

        answer = self._controller.feed(command, committed=done)
        then()
        await written
        return answer

    def changed(self, command: Command) -> None:
        """A person's command has changed something."""
        self._on_manual(command.stimulus_id)

    # --- cancels -----------------------------------------------------------------------------------

    async def _cancel_drain(self, command: Drain) -> dict[str, Any]:
        """A person waits for the answer. Raises `DrainNotCancellable` with what the worker says if that is no."""
        found = self._controller.fleet.find(command.name)
        name = command.name if found is None else found.name
        answered: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._call_backs[command.stimulus_id] = answered
        try:
            moves = (await self._carried_out(command)).moves
            calls_back = any(move.kind is MoveKind.CANCEL_DRAIN for move in moves)
            error = await self._refusal(answered) if calls_back else None
        finally:
            self._call_backs.pop(command.stimulus_id, None)
        if error is not None:
            raise DrainNotCancellable(f"the drain of {name} could not be taken back: {error}")
        return self._of_one(name, moves, self._controller.fleet)

    async def _refusal(self, answered: asyncio.Future[str | None]) -> str | None:
        """Why the worker cannot take its drain back; None if it has."""
        try:
            async with asyncio.timeout(CALL_BACK_TIMEOUT_S):
                return await answered
        except TimeoutError:
            return f"it did not answer within {CALL_BACK_TIMEOUT_S:g} s; if it hears of it later, it stays"

    async def _cancel_flip(self, command: Flip) -> dict[str, Any]:
        """Returns when the worker has stayed what it was. Raises `FlipNotCancellable` if the cancel came too late."""
        assert self._waiting is not None
        worker = self._controller.fleet.worker(command.name)
        name = worker.name
        moves = (await self._carried_out(command)).moves
        deadline_s = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_S

        def over() -> bool:
            now = self._controller.fleet.workers.get(name)
            return now is None or now.flip is None or now.pid != worker.pid

        if not await self._waiting.until(over, deadline_s):
            raise TimedOut(
                f"{name} has not answered within {CANCEL_TIMEOUT_S:g} s. The flip goes on: see `dynamo status`"
            )
        workers = self._controller.fleet.workers
        now = workers.get(name)
        if now is None or now.pid != worker.pid:
            became = next((each.name for each in workers.values() if each.pid == worker.pid), "gone")
            raise FlipNotCancellable(
                f"the flip of {name} was taken back too late: it is {became} now; `dynamo flip {became}` flips it back"
            )
        return {"watcher_name": name, "becomes": None, "state": str(now.state), "instructions": as_json(moves)}

    # --- an observer of the controller ---------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Note a refused lock, and pass a worker's answer on to the command that waits for it."""
        if isinstance(event, GpuReserved) and event.stimulus_id in self._lock_refused:
            self._lock_refused[event.stimulus_id] = True
        if isinstance(event, CalledBack):
            answered = self._call_backs.pop(event.requested_by or "", None)
            if answered is not None and not answered.done():
                answered.set_result(event.error)


def as_json(moves: Iterable[Move]) -> list[dict[str, str]]:
    """The moves as a command's answer has them, where the list is called `instructions`."""
    return [
        {"kind": move.kind, "watcher_name": move.name, "reason": move.reason}
        | ({} if move.becomes is None else {"becomes": move.becomes.name})
        for move in moves
    ]
