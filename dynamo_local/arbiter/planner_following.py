"""Carries out another planner's decisions, from its keys in etcd (`dynamo serve --follow virtual`).

`planner.following` decides the next step. This module reads keys and fleet, scales as `dynamo scale` does, and
acknowledges. `dynamo status` and the event log show its progress under the name `NAMESPACE_follow`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dynamo_local.arbiter.controller import Waiting
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.planner_observation import ArbiterWorld
from dynamo_local.arbiter.statefile import Statefile
from dynamo_local.clock import Clock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.resolve import planned_components
from dynamo_local.core.fleet.events import Change, Scale
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.notes import Elsewhere, Tell
from dynamo_local.core.types import GraphSpec
from dynamo_local.core.virtual import Layout, PlannerDecision
from dynamo_local.errors import DynamoError, EtcdUnavailable
from dynamo_local.planner.connectors import Run, VirtualConnector, VirtualKeys
from dynamo_local.planner.following import Next, Phase, next_step
from dynamo_local.planner.values import WorkerPools
from dynamo_local.ports import KeyValueStore
from dynamo_local.state.schema import FollowEntry

log = logging.getLogger(__name__)

ENVIRONMENT = "virtual"
NAME = "follow"
AGAIN_S = 2.0
"""A refused step is tried again when the fleet changes, and at this interval: a foreign process frees a GPU unseen."""
_TRIED_AGAIN = frozenset({Phase.REFUSED, Phase.UNDER_WAY})
"""In every other phase only a change of the keys or of the fleet makes a difference."""


class DecisionFollower:
    """Follows the keys of one namespace from `start` to `stop`. `fleet` counts the workers of both roles."""

    def __init__(
        self,
        kv: KeyValueStore,
        namespace: str,
        layout: Layout,
        *,
        fleet: Callable[[], WorkerPools],
        waiting: Waiting,
        record: Callable[[dict[str, Any]], Awaitable[None]],
        run: Run,
        clock: Clock,
        tell: Tell,
    ) -> None:
        self._namespace = namespace
        self._layout = layout
        self._keys = VirtualKeys(kv, namespace, layout, on_change=waiting.notify)
        self._fleet = fleet
        self._waiting = waiting
        self._record = record
        self._clock = clock
        self._run_command = run
        self._tell = tell
        self._now = Next(Phase.WAITING, reason="etcd was not read yet")
        self._troubled = False
        self._stopping = False
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        """Follow from now on. The workers must be ready."""
        self._tasks = (asyncio.ensure_future(self._keys.follow()), asyncio.ensure_future(self._run()))

    async def stop(self) -> None:
        """Returns when the present step has ended."""
        self._stopping = True
        self._waiting.notify()
        tasks, self._tasks = self._tasks, ()
        if tasks:
            await asyncio.gather(tasks[1], return_exceptions=True)
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """`follow` in `dynamo status --json`. `scaled_decision_id` is the last acknowledged one."""
        decision = self._now.decision
        return {
            "environment": ENVIRONMENT,
            "layout": str(self._layout),
            "keys": self._keys.root,
            "phase": str(self._now.phase),
            "decision_id": decision.decision_id,
            "num_prefill_workers": decision.num_prefill_workers,
            "num_decode_workers": decision.num_decode_workers,
            "scaled_decision_id": self._keys.reported.scaled_decision_id,
            "reason": self._now.reason,
        }

    # --- inside ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            seen, again = self._seen(), True
            try:
                await self._step()
                again = self._now.phase in _TRIED_AGAIN
            except Exception as error:  # a defect: keep following, and report it
                self._failed(error)
            deadline_s = self._clock.now_s() + AGAIN_S if again else None
            await self._waiting.until(partial(self._moved, seen), deadline_s)

    def _failed(self, error: Exception) -> None:
        log.error("a step of --follow failed, and is tried again", exc_info=error)
        reason = f"a step failed ({type(error).__name__}: {error}); the arbiter's log says more"
        if self._now.reason != reason:
            self._tell(f"follow: {reason}", Elsewhere())
        self._now = replace(self._now, reason=reason)

    def _moved(self, seen: tuple[Any, ...]) -> bool:
        return self._stopping or self._seen() != seen

    def _seen(self) -> tuple[Any, ...]:
        """The inputs of a step, without GPUs that foreign processes hold."""
        return (self._keys.current, self._keys.reported, self._fleet())

    async def _step(self) -> None:
        if not self._keys.current:
            reason = "etcd does not answer; what was decided last stays"
            self._now = replace(self._now, reason=reason)
            return
        step = next_step(self._keys.reported, self._fleet(), self._now)
        refused = []
        for component, target in step.steps:
            try:
                await self._scale(component, target, step.decision)
            except DynamoError as error:
                refused.append(f"{component}={target}: {error}")
        if refused:
            step = Next(Phase.REFUSED, step.decision, reason="; ".join(refused))
        elif step.acknowledge:
            try:
                await self._keys.acknowledge(step.decision.decision_id)
            except EtcdUnavailable as error:
                reason = f"carried out, but that cannot be written: {error}"
                await self._at(Next(Phase.UNDER_WAY, step.decision, reason=reason))
                return
        await self._at(step)

    async def _scale(self, component: str, target: int, decision: PlannerDecision) -> None:
        """As `dynamo scale COMPONENT =N`, but a planner's: it never forces, restarts nothing that is faulted, and may
        wait for the GPUs of workers that leave."""
        command = Scale(
            stimulus_id=f"{ENVIRONMENT}:{decision.decision_id}",
            component=component,
            target=Change(target, relative=False),
            by_person=False,
            wait_for_gpus=True,
        )
        await self._run_command(command)
        log.info("%s: %s=%d is under way", decision, component, target)

    async def _at(self, now: Next) -> None:
        """Note the progress. A new phase or decision is logged and told."""
        before, self._now = self._now, now
        if _same(before, now):
            return
        troubled = now.phase in (Phase.REFUSED, Phase.UNREADABLE)
        if troubled:
            what = "cannot be carried out" if now.phase is Phase.REFUSED else "is refused, nothing is changed"
            self._tell(f"follow: {now.decision} {what}: {now.reason}", Elsewhere())
        elif self._troubled and now.phase is Phase.DONE:
            self._tell(f"follow: {now.decision} is carried out", Elsewhere())
        self._troubled = troubled or (self._troubled and now.phase is not Phase.DONE)
        await self._record(
            {
                "time": self._clock.wall_s(),
                "watcher_name": f"{self._namespace}_{NAME}",
                "component": NAME,
                "event": "PlannerDecision",
                "from": str(before.phase),
                "to": str(now.phase),
                "stimulus_id": f"{ENVIRONMENT}:{now.decision.decision_id}",
                "num_prefill_workers": now.decision.num_prefill_workers,
                "num_decode_workers": now.decision.num_decode_workers,
                "reason": now.reason,
            }
        )


def _same(before: Next, now: Next) -> bool:
    """Whether both mean the same. For unreadable keys the reason decides."""
    if before.phase is now.phase is Phase.UNREADABLE:
        return before.reason == now.reason
    return (before.phase, before.decision) == (now.phase, now.decision)


async def layout_to_follow(
    statefile: Statefile, fleet: Callable[[], Fleet], requested: Layout | None, *, plans: bool
) -> Layout | None:
    """Which keys to follow, kept in the statefile.

    The command line (`requested`) wins. Otherwise an adopted run goes on following, unless it `plans` itself.
    """
    head = statefile.head
    before, layout = head.follow, requested
    if layout is None and before is not None and not plans:
        layout = Layout(before.keys)
    head.follow = None if layout is None else FollowEntry(keys=layout.value)
    if head.follow != before:
        await statefile.write_head(fleet)
    return layout


async def connected_virtually(
    options: PlannerConfig, graph: GraphSpec, world: ArbiterWorld, *, links: Links, clock: Clock, tell: Tell
) -> VirtualConnector:
    """A connector that follows the keys from now on. Raises `EtcdUnavailable`."""
    prefill, decode = planned_components(graph)
    virtual = VirtualConnector(
        VirtualKeys(links.kv, graph.namespace, Layout(options.virtual_keys)),
        clock,
        prefill=prefill,
        decode=decode,
        counts=lambda: {pool.component: pool.capacity for pool in world.worker_pools().all},
        max_wait_s=options.virtual_max_wait,
        blocking=options.virtual_blocking,
        tell=tell,
    )
    await virtual.start()
    return virtual
