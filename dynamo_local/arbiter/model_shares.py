"""Models that share the GPUs: measures each, lets `core.gpu_shares` decide, and gives the orders.

The decision is made anew every second, and at once when a Frontend tells that it holds requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgspec

from dynamo_local.arbiter.commands import Commands
from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.events import ScaleAll, VictimPolicy
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.gpu_shares import HeldNow, ModelNow, Share, Sharing, shares
from dynamo_local.core.lead_times import OptionKind
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.types import GraphSpec, Missing, ServiceSpec, WorkerState
from dynamo_local.errors import BeingRestarted, DynamoError
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent

log = logging.getLogger(__name__)

EVERY_S = 1.0
AT_MOST_EVERY_S = 0.05
"""So that a burst of changes at a Frontend is one decision."""
RECENT_S = 10.0
"""Requests in the workers are averaged over so long for the rate of now."""
BUSY_DEFAULT_S = 2.0
ARRIVES_DEFAULT_S = 30.0
SLOTS_DEFAULT = 64
"""For a model of which no worker has told how many requests it takes at once."""
SLACK_DEFAULT_S = 1.0
"""How long a request may wait where the model has no target for the time to first token."""

Held = Mapping[str, HeldNow]
_decoder = msgspec.json.Decoder(dict[str, HeldNow])


@dataclass(slots=True)
class _Usage:
    """What is remembered of one model: requests in its workers by second, and when there was one last."""

    requests: deque[tuple[float, int]] = field(default_factory=deque)
    used_s: float = -math.inf
    busy_s: float = BUSY_DEFAULT_S
    slots: int = SLOTS_DEFAULT


class ModelShares:
    """The models of one run. `graph` is the graph of now, which an apply replaces; `lead_times` are medians."""

    def __init__(
        self,
        graph: Callable[[], GraphSpec],
        controller: FleetController,
        commands: Commands,
        sampling: Sampling,
        links: Links,
        lead_times: Callable[[str], Mapping[str, float]],
        clock: Clock,
        tell: Tell,
    ) -> None:
        self._graph = graph
        self._controller = controller
        self._commands = commands
        self._sampling = sampling
        self._links = links
        self._lead_times = lead_times
        self._clock = clock
        self._tell = tell
        self._held: dict[str, Held] = {}
        self._usage: dict[str, _Usage] = {}
        self._decided: Mapping[str, Share] = {}
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._troubled = False

    @property
    def any(self) -> bool:
        """Whether the graph has models that share the GPUs."""
        return any(spec.sharing is not None for spec in self._graph().services)

    # --- held requests -----------------------------------------------------------------------------

    async def follow(self) -> None:
        """Run for ever: what Frontends hold, as their keys in etcd tell it."""
        prefix = f"{self._graph().namespace}/held/"
        async for event in self._links.kv.watch_prefix(prefix):
            if isinstance(event, SnapshotEvent):
                self._held = {kv.key: held for kv in event.kvs if (held := _held_in(kv)) is not None}
            elif isinstance(event, PutEvent):
                self._held[event.kv.key] = _held_in(event.kv) or {}
            elif isinstance(event, DeleteEvent):
                self._held.pop(event.key, None)
            self._news.set()

    def _held_of(self, component: str, now_s: float) -> tuple[int, float]:
        """How many requests all Frontends hold for it, and for how long the oldest."""
        found = [each[component] for each in self._held.values() if component in each]
        if not found:
            return 0, 0.0
        return sum(each.count for each in found), max(0.0, now_s - min(each.since_s for each in found))

    # --- deciding ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run for ever. Does nothing while no model shares the GPUs."""
        while True:
            self._news.clear()
            if self.any:
                await self.decide()
                await asyncio.sleep(AT_MOST_EVERY_S)
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def decide(self) -> None:
        """Measure, decide, and give the orders."""
        fleet, now_s = self._controller.fleet, self._clock.now_s()
        if fleet.leaving is not None:
            return
        specs = [spec for spec in self._graph().services if spec.sharing is not None and spec.resources.gpu]
        models = [self._measured(spec, fleet, now_s) for spec in specs]
        self._usage = {spec.name: self._usage[spec.name] for spec in specs}
        self._decided = shares(models, usable_gpus(fleet, {spec.name for spec in specs}))
        targets = {name: share.workers for name, share in self._decided.items()}
        if any(fleet.capacity(name) != count for name, count in targets.items()):
            await self._order(targets)

    async def _order(self, targets: Mapping[str, int]) -> None:
        """All at once. Where that is refused, each model by itself, so that one in trouble holds no other up."""
        cause = f"models:{next(self._numbers)}"
        try:
            await self._commands.run(_scale(cause, targets))
            if self._troubled:
                self._tell("the GPUs are shared as decided", Over("models"))
                self._troubled = False
            return
        except DynamoError as error:
            refused = error
        fleet = self._controller.fleet
        order = sorted(targets, key=lambda name: targets[name] - fleet.capacity(name))
        for name in order:
            if targets[name] == fleet.capacity(name):
                continue
            try:
                await self._commands.run(_scale(cause, {name: targets[name]}))
            except DynamoError as error:
                refused = error
        log.info("%s: %s", cause, refused)
        if not isinstance(refused, BeingRestarted):  # which goes by
            self._tell(f"the GPUs could not be shared as decided: {refused}", Trouble("models"))
            self._troubled = True

    # --- measuring ---------------------------------------------------------------------------------

    def _measured(self, spec: ServiceSpec, fleet: Fleet, now_s: float) -> ModelNow:
        assert spec.sharing is not None
        name, usage = spec.name, self._usage.setdefault(spec.name, _Usage(used_s=now_s))
        workers = fleet.of(name)
        requests, slots = _load(workers)
        usage.slots = slots or usage.slots
        held, held_s = self._held_of(name, now_s)
        if requests or held:
            usage.used_s = now_s
        usage.requests.append((now_s, requests))
        while usage.requests[0][0] < now_s - 60.0:
            usage.requests.popleft()
        rate = self._rate(name, usage, now_s)
        capacity = fleet.capacity(name)
        faulted = any(worker.state is WorkerState.FAULTED for worker in workers)
        sharing = spec.sharing if not faulted else _capped(spec, capacity)
        ready = [worker for worker in workers if worker.ready]
        return ModelNow(
            name=name,
            sharing=sharing,
            gpus=spec.resources.gpu,
            workers=capacity,
            requests=requests,
            held=held,
            held_s=held_s,
            rate=rate,
            busy_s=usage.busy_s,
            slots=spec.sharing.slots or usage.slots,
            slack_s=_slack_s(spec),
            arrives_s=self._arrives_s(name, workers),
            stayed_s=None if len(ready) < capacity else min((now_s - each.since_s for each in ready), default=None),
            unused_s=now_s - usage.used_s,
        )

    def _rate(self, name: str, usage: _Usage, now_s: float) -> float:
        """Requests per second, by Little's law: those that are in the workers ÷ the time that one stays there.

        That time comes from the last minute: the mean number of requests ÷ the rate at which they ended.
        """
        figures = self._sampling.last_minute.figures(name, now_s)
        ended = None if figures is None else figures["requests_per_s"]
        if ended:
            usage.busy_s = max(0.001, fmean(count for _, count in usage.requests) / ended)
        recent = [count for at_s, count in usage.requests if at_s >= now_s - RECENT_S]
        return max(fmean(recent) / usage.busy_s, 0.0)

    def _arrives_s(self, name: str, workers: tuple[Worker, ...]) -> float:
        """How long one more worker takes, as measured on this host."""
        found = self._lead_times(name)
        asleep = {worker.standby.level for worker in workers if worker.stands_by}
        wakes = [OptionKind.WAKE_1] * (1 in asleep) + [OptionKind.WAKE_2] * (2 in asleep)
        options = (*wakes, OptionKind.PREWARMED, OptionKind.COLD)
        return next((found[option] for option in options if option in found), ARRIVES_DEFAULT_S)

    # --- telling -----------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """`models` in `dynamo status --json`; empty where no model shares the GPUs."""
        return list(self._rows()) if self.any else []

    def _rows(self) -> Iterator[dict[str, Any]]:
        fleet, now_s = self._controller.fleet, self._clock.now_s()
        for spec in self._graph().services:
            if spec.sharing is None:
                continue
            share, (held, held_s) = self._decided.get(spec.name), self._held_of(spec.name, now_s)
            workers = fleet.of(spec.name)
            yield {
                "model": spec.config.get("served_model_name") or spec.name,
                "component": spec.name,
                "ready": len(fleet.ready(spec.name)),
                "asleep": sum(worker.stands_by for worker in workers),
                "target": fleet.capacity(spec.name),
                "gpus_per_worker": spec.resources.gpu,
                "floor": spec.sharing.floor,
                "cap": spec.sharing.cap,
                "held": held,
                "held_s": round(held_s, 3),
                "why": None if share is None else share.why,
                "last_worth": None if share is None else round(share.last, 6),
                "next_worth": None if share is None else round(share.more, 6),
            }


def usable_gpus(fleet: Fleet, components: set[str]) -> int:
    """Devices that the models have or can have: those that are free, and those that their workers hold."""
    held = sum(len(worker.gpus) for worker in fleet.workers.values() if worker.component in components)
    return len(fleet.gpus.free) + held


def _scale(cause: str, targets: Mapping[str, int]) -> ScaleAll:
    return ScaleAll(stimulus_id=cause, targets=targets, victim_policy=VictimPolicy.LEAST_LOADED)


def _held_in(kv: KeyValue) -> Held | None:
    try:
        return _decoder.decode(kv.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the key %s does not say what a Frontend holds; ignored: %s", kv.key, error)
        return None


def _load(workers: tuple[Worker, ...]) -> tuple[int, int | None]:
    """Requests that run or wait in them, and how many one takes at once (None: none has told)."""
    loads = [worker.load for worker in workers if worker.ready and not isinstance(worker.load, Missing)]
    requests = sum(load.request_active_slots + load.num_requests_waiting for load in loads)
    return requests, max((load.request_total_slots for load in loads), default=None)


def _slack_s(spec: ServiceSpec) -> float:
    """Half of the target for the first token: the other half is its prefill's."""
    ttft = spec.config.get("ttft")
    return ttft / 2000.0 if isinstance(ttft, int | float) and ttft > 0 else SLACK_DEFAULT_S


def _capped(spec: ServiceSpec, capacity: int) -> Sharing:
    """A component with a faulted worker gets no more: only a person starts that again."""
    assert spec.sharing is not None
    return replace(spec.sharing, cap=max(capacity, spec.sharing.floor))
