"""The commands, as a simulated arbiter is given them. A refusal is an answer."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynamo_local.arbiter.commands import Commands as ArbiterCommands
from dynamo_local.core.fleet.events import Apply, Drain, Flip, Restart, Scale, ScaleFlip, VictimPolicy, parse_target
from dynamo_local.core.fleet.fleet import Intent, Worker
from dynamo_local.core.fleet.lifecycle import IllegalTransition
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DynamoError

if TYPE_CHECKING:
    from tests.simulation.watched_controller import WatchedController
    from tests.simulation.world import World

LEAVES = (WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT, WorkerState.EXITED)


class Commands:
    """A part of `Arbiter`, which has all that is named here."""

    world: World
    controller: WatchedController
    commands: ArbiterCommands
    wanted: set[str]
    unforced: set[str]
    restarts: set[str]
    _cancelling: set[str]

    @property
    def workers(self) -> dict[str, Worker]:
        """By watcher name."""
        return dict(self.controller.fleet.workers)

    async def scale(self, component: str, target: str, *, force: bool, policy: str | None, stimulus_id: str) -> None:
        """`dynamo scale`; refusals are answers."""
        if not force:
            self.unforced.add(stimulus_id)
        await self.command(
            f"scale {component} {target}{' --force' * force}",
            self.commands.run(
                Scale(
                    stimulus_id=stimulus_id,
                    component=component,
                    target=parse_target(target),
                    force=force,
                    victim_policy=VictimPolicy(policy or VictimPolicy.HIGHEST_SUFFIX),
                )
            ),
        )

    async def drain(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> None:
        """`dynamo drain`."""
        if not force:
            self.unforced.add(stimulus_id)
        words = f"drain {name}{' --cancel' * cancel}{' --force' * force}"
        work = self.commands.run(Drain(stimulus_id=stimulus_id, name=name, cancel=cancel, force=force))
        answered = await self.command(words, work)
        worker = self.workers.get(name)
        # The person was told that it goes, unless it was gone before the answer: then it has been started anew.
        goes = worker is None or (worker.state in LEAVES and worker.intent is Intent.STEADY)
        if cancel and not answered and stimulus_id in self._cancelling and goes:
            self.wanted.discard(name)

    async def restart(self, target: str, *, force: bool, stimulus_id: str) -> None:
        """`dynamo restart`."""
        self.restarts.add(stimulus_id)
        work = self.commands.run(Restart(stimulus_id=stimulus_id, name=target, force=force))
        await self.command(f"restart {target}", work)

    async def apply(
        self, renewed: Collection[str], counts: Mapping[str, int], *, force: bool, stimulus_id: str
    ) -> None:
        """`dynamo apply`: these components start otherwise from now on, and have so many workers."""
        self.restarts.add(stimulus_id)
        templates = tuple(
            replace(each, fingerprint=stimulus_id) if each.component in renewed else each
            for each in self.controller.fleet.templates
        )
        order = Apply(
            stimulus_id=stimulus_id,
            templates=templates,
            counts=counts,
            policy=self.controller.fleet.policy,
            force=force,
        )
        words = f"apply {sorted(renewed)} {dict(counts)}{' --force' * force}"
        await self.command(words, self._applied(order))

    async def _applied(self, order: Apply) -> dict[str, Any]:
        await self.commands.committed(order)
        return {}

    async def command(self, words: str, work: Coroutine[Any, Any, dict[str, Any]]) -> bool:
        """Whether it was carried out; a refusal is an answer."""
        self.world.note(f"$ dynamo {words}")
        try:
            answer = await work
        except IllegalTransition:
            raise  # a command may be refused, but never by the table
        except DynamoError as error:
            self.world.note(f"  {words}: {type(error).__name__}: {str(error)[:100]}")
            return False
        done = [f"{each['kind']} {each['watcher_name']}" for each in answer.get("instructions", ())]
        self.world.note(f"  {words}: {done}")
        return True

    async def flip(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> None:
        """`dynamo flip`."""
        if not force:
            self.unforced.add(stimulus_id)
        words = f"flip {name}{' --cancel' * cancel}{' --force' * force}"
        command = Flip(stimulus_id=stimulus_id, name=name, cancel=cancel, force=force)
        await self.command(words, self.commands.run(command))

    async def scale_flip(self, gives: str, takes: str, count: int, *, force: bool, stimulus_id: str) -> None:
        """`dynamo scale … --flip`."""
        if not force:
            self.unforced.add(stimulus_id)
        command = ScaleFlip(stimulus_id=stimulus_id, gives=gives, takes=takes, count=count, force=force)
        await self.command(
            f"scale {gives} -{count} {takes} +{count} --flip{' --force' * force}", self.commands.run(command)
        )
