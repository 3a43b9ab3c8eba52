"""Models that share the GPUs: measures each, lets `core.gpu_shares` decide, and gives the orders.

The decision is made anew every second, and at once when a Frontend tells that it holds requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.arbiter.commands import Commands
from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.metrics import PREFIX
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.events import Drain, ScaleAll, VictimPolicy
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.gpu_shares import LET_GO, RECENT_S, HeldNow, ModelNow, Share, Sharing, Usage, shares, slack_s
from dynamo_local.core.lead_times import OptionKind
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.types import GraphSpec, Load, Missing, ServiceSpec, WorkerState
from dynamo_local.errors import BeingRestarted, DynamoError
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent

log = logging.getLogger(__name__)

EVERY_S, IDLE_EVERY_S = 1.0, 2.0
"""The second while no model has a request: 24 models on 64 GPUs cost 9 ms each time."""
AT_MOST_EVERY_S = 0.05
"""So that a burst of changes at a Frontend is one decision."""
ARRIVES_DEFAULT_S = 30.0
LET_GO_TIMEOUT_S = 0.5
"""Short: decisions wait for it, and the next one asks again."""

Held = Mapping[str, HeldNow]
_decoder = msgspec.json.Decoder(dict[str, HeldNow])


class ModelShares:
    """The models of one run. `graph` is the graph of now, which an apply replaces; `lead_times` are medians.

    `control` asks a worker's control endpoint (`worker_requests.WorkerAsks`).
    """

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
        control: Callable[..., Awaitable[Any]],
    ) -> None:
        self._graph = graph
        self._controller = controller
        self._commands = commands
        self._sampling = sampling
        self._links = links
        self._lead_times = lead_times
        self._clock = clock
        self._tell = tell
        self._control = control
        self._held: dict[str, Held] = {}
        self._usage: dict[str, Usage] = {}
        self._decided: Mapping[str, Share] = {}
        self._idle: tuple[Any, ...] = ()
        self._arrived_s: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._troubled = False

    @property
    def is_needed(self) -> bool:
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
            if self.is_needed:
                await self.decide()
                await asyncio.sleep(AT_MOST_EVERY_S)
            now_s = self._clock.now_s()
            busy = any(now_s - usage.used_s < RECENT_S for usage in self._usage.values()) or self._held
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S if busy else IDLE_EVERY_S):
                    await self._news.wait()

    async def decide(self) -> None:
        """Measure, decide, and give the orders."""
        fleet, now_s = self._controller.fleet, self._clock.now_s()
        if fleet.leaving is not None:
            return
        shared = [spec for spec in self._graph().services if spec.sharing is not None and spec.resources.gpu]
        specs = [spec for spec in shared if _beside(spec) is None]
        prefill = _prefill_of_models(shared)
        models = [self._measured(spec, prefill.get(spec.name), fleet, now_s) for spec in specs]
        self._usage = {spec.name: self._usage[spec.name] for spec in specs}
        gpus = usable_gpus(fleet, {spec.name for spec in shared})
        idle = (gpus, *(each.when_idle for each in models))
        if None in idle or idle != self._idle:
            self._decided = shares(models, gpus)
        self._idle = idle
        targets = {name: share.workers for name, share in self._decided.items()}
        targets |= prefill_targets(shared, targets, fleet)
        if any(fleet.capacity(name) != count for name, count in targets.items()):
            await self._order(targets)
        for name in stranded(fleet, set(targets)):
            with contextlib.suppress(DynamoError):  # it has changed since: the next decision sees how
                await self._commands.run(Drain(stimulus_id="models:stranded", name=name))
        await self._let_go()

    async def _let_go(self) -> None:
        """End requests that a Frontend of an older configuration holds for removed models.

        Nobody decides about such a model any more. A worker of it that serves, or will, is waited for.
        """
        kept, fleet = {spec.name for spec in self._graph().services}, self._controller.fleet
        for key, held in tuple(self._held.items()):
            removed = [name for name in held if name not in kept and not fleet.capacity(name)]
            if removed:
                try:
                    frontend = key.rpartition("/")[2]
                    await self._control(frontend, LET_GO, timeout_s=LET_GO_TIMEOUT_S, components=removed)
                except DynamoError as error:  # the next decision asks again
                    log.info("%s still holds requests for %s: %s", key, ", ".join(removed), error)

    async def _order(self, targets: Mapping[str, int]) -> None:
        """All at once. Where that is refused, each model by itself, so that one in trouble holds no other up."""
        cause = f"models:{next(self._numbers)}"
        try:
            await self._commands.run(self._scale(cause, targets))
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
                await self._commands.run(self._scale(cause, {name: targets[name]}))
            except DynamoError as error:
                refused = error
        log.info("%s: %s", cause, refused)
        if not isinstance(refused, BeingRestarted):  # which goes by
            self._tell(f"the GPUs could not be shared as decided: {refused}", Trouble("models"))
            self._troubled = True

    def _scale(self, cause: str, targets: Mapping[str, int]) -> ScaleAll:
        models = {spec.name: _beside(spec) or spec.name for spec in self._graph().services}
        reasons = {name: self._decided[models[name]].why for name in targets}
        return ScaleAll(stimulus_id=cause, targets=targets, reasons=reasons, victim_policy=VictimPolicy.LEAST_LOADED)

    # --- measuring ---------------------------------------------------------------------------------

    def _measured(self, spec: ServiceSpec, prefill: ServiceSpec | None, fleet: Fleet, now_s: float) -> ModelNow:
        assert spec.sharing is not None
        name, usage = spec.name, self._usage.setdefault(spec.name, Usage(seen_s=now_s, used_s=now_s))
        workers = fleet.of(name)
        staying = _loads(worker for worker in workers if worker.ready)
        leaving = _loads(worker for worker in workers if worker.state is WorkerState.DRAINING)
        usage.slots = max((load.request_total_slots for load in staying), default=0) or usage.slots
        held, held_s = self._held_of(name, now_s)
        requests = _requests(staying)
        usage.look(
            now_s,
            running=sum(load.request_active_slots for load in (*staying, *leaving)),
            here=requests + _requests(leaving) + held,
            ended=self._sampling.last_minute.ended(name),
        )
        capacity = fleet.capacity(name)
        beside = () if prefill is None else fleet.of(prefill.name)
        faulted = any(worker.state is WorkerState.FAULTED for worker in (*workers, *beside))
        stayed_s = [now_s - worker.since_s for worker in workers if worker.ready]
        return ModelNow(
            name=name,
            sharing=_capped(spec.sharing, capacity) if faulted else spec.sharing,
            gpus=_gpus_of(spec, prefill),
            workers=capacity,
            requests=requests,
            held=held,
            held_s=held_s,
            rate=usage.rate,
            rate_long=usage.rate_long,
            rate_sd=usage.rate_sd,
            busy_s=usage.busy_s,
            slots=spec.sharing.slots or usage.slots,
            slack_s=slack_s(_ttft_s(spec)),
            arrives_s=self._arrives_s(name, workers),
            stayed_s=None if len(stayed_s) < capacity else min(stayed_s, default=None),
            young=capacity - sum(each >= spec.sharing.min_stay_s for each in stayed_s),
            unused_s=now_s - usage.used_s,
        )

    def _arrives_s(self, name: str, workers: tuple[Worker, ...]) -> float:
        """How long one more worker takes, as measured on this host. A model that never started takes as long as the
        slowest of the others."""
        found = self._lead_times(name)
        asleep = {worker.standby.level for worker in workers if worker.stands_by}
        wakes = [OptionKind.WAKE_1] * (1 in asleep) + [OptionKind.WAKE_2] * (2 in asleep)
        options = (*wakes, OptionKind.PREWARMED, OptionKind.COLD)
        arrives_s = next((found[option] for option in options if option in found), None)
        if arrives_s is not None:
            self._arrived_s[name] = arrives_s
            return arrives_s
        return max(self._arrived_s.values(), default=ARRIVES_DEFAULT_S)

    # --- telling -----------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """`models` in `dynamo status --json`; empty where no model shares the GPUs."""
        return list(self._rows()) if self.is_needed else []

    def _rows(self) -> Iterator[dict[str, Any]]:
        fleet, now_s = self._controller.fleet, self._clock.now_s()
        services = self._graph().services
        prefill = _prefill_of_models(services)
        for spec in services:
            if spec.sharing is None or _beside(spec) is not None:
                continue
            share, (held, held_s) = self._decided.get(spec.name), self._held_of(spec.name, now_s)
            workers = fleet.of(spec.name)
            yield {
                "model": _name_of(spec),
                "component": spec.name,
                "ready": len(fleet.ready(spec.name)),
                "asleep": sum(worker.stands_by for worker in workers),
                "target": fleet.capacity(spec.name),
                "gpus_per_worker": _gpus_of(spec, prefill.get(spec.name)),
                "floor": spec.sharing.floor,
                "cap": spec.sharing.cap,
                "held": held,
                "held_s": round(held_s, 3),
                "why": None if share is None else share.why,
                "last_worth": None if share is None else round(share.last, 6),
                "next_worth": None if share is None else round(share.more, 6),
            }


def _beside(spec: ServiceSpec) -> str | None:
    """The model's component that these prefill workers are beside; None: they are none of a model."""
    return None if spec.sharing is None else spec.sharing.beside


def _prefill_of_models(services: Iterable[ServiceSpec]) -> dict[str, ServiceSpec]:
    """The prefill workers of each model that has some, by its component."""
    return {model: each for each in services if (model := _beside(each)) is not None}


def _gpus_of(spec: ServiceSpec, prefill: ServiceSpec | None) -> int:
    """GPUs of one worker of a model, and of the prefill workers beside it."""
    if prefill is None or prefill.sharing is None:
        return spec.resources.gpu
    return spec.resources.gpu + prefill.sharing.each * prefill.resources.gpu


FINISHING = (WorkerState.DRAINING, WorkerState.FALLING_ASLEEP)
"""States in which a worker finishes what it has."""


def prefill_targets(shared: Iterable[ServiceSpec], targets: Mapping[str, int], fleet: Fleet) -> dict[str, int]:
    """How many prefill workers each model has.

    Those of a worker that leaves stay until it is gone: some of its requests may still wait for their prefill.
    Where one has faulted, their number does not grow.
    """
    found = {}
    for spec in shared:
        model = _beside(spec)
        if spec.sharing is not None and model is not None and model in targets:
            serving = sum(each.ready or each.state in FINISHING for each in fleet.of(model))
            wanted = spec.sharing.each * max(targets[model], serving)
            faulted = any(worker.state is WorkerState.FAULTED for worker in fleet.of(spec.name))
            found[spec.name] = min(wanted, fleet.capacity(spec.name)) if faulted else wanted
    return found


def usable_gpus(fleet: Fleet, components: set[str]) -> int:
    """Devices that the models have or can have: those that are free, and those that their workers hold."""
    held = sum(len(worker.gpus) for worker in fleet.workers.values() if worker.component in components)
    return len(fleet.gpus.free) + held


def stranded(fleet: Fleet, components: set[str]) -> list[str]:
    """Sleepers whose GPUs nobody can use.

    The process of an earlier arbiter's sleeper alone holds the locks of its GPUs. Beside a sleeper that keeps an
    unknown amount nothing can start: in a container NVML does not show our processes.
    """
    return [
        name
        for name, sleeper in fleet.gpus.sleepers.items()
        if (worker := fleet.workers.get(name)) is not None
        and worker.component in components
        and worker.stands_by
        and (isinstance(sleeper.vram_bytes, Missing) or any(uuid in fleet.gpus.elsewhere for uuid in sleeper.uuids))
    ]


def _held_in(kv: KeyValue) -> Held | None:
    try:
        return _decoder.decode(kv.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the key %s does not say what a Frontend holds; ignored: %s", kv.key, error)
        return None


def _loads(workers: Iterable[Worker]) -> list[Load]:
    """The loads that they have told."""
    return [worker.load for worker in workers if not isinstance(worker.load, Missing)]


def _requests(loads: Iterable[Load]) -> int:
    """Requests that run or wait there."""
    return sum(load.request_active_slots + load.num_requests_waiting for load in loads)


def _name_of(spec: ServiceSpec) -> str:
    """The model's name in the API; of a command, the first that its server must list."""
    name: str = spec.config.get("served_model_name") or next(iter(spec.config.get("must_serve") or ()), spec.name)
    return name


def _ttft_s(spec: ServiceSpec) -> float | None:
    """The model's target for the first token, if it has one."""
    ttft = spec.config.get("ttft")
    return ttft / 1000.0 if isinstance(ttft, int | float) and ttft > 0 else None


def _capped(sharing: Sharing, capacity: int) -> Sharing:
    """A component with a faulted worker gets no more: only a person starts that again."""
    return replace(sharing, floor=min(sharing.floor, capacity), cap=max(1, capacity))


class ModelMetrics(Collector):
    """The models that share the GPUs, on `/metrics`. Without such models there is no sample."""

    def __init__(self, registry: CollectorRegistry, rows: Callable[[], list[dict[str, Any]]] = list) -> None:
        self._rows = rows
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return _families([])

    def collect(self) -> Iterator[Metric]:
        return _families(self._rows())


def _families(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        f"{PREFIX}_model_workers", "Workers of a model that shares the GPUs", labels=["model", "state"]
    )
    held = GaugeMetricFamily(f"{PREFIX}_model_held", "Requests that are held for a worker", labels=["model"])
    oldest = GaugeMetricFamily(f"{PREFIX}_model_held_seconds", "For how long the oldest of them is", labels=["model"])
    for row in rows:
        for state in ("ready", "asleep"):
            workers.add_metric([row["model"], state], row[state])
        held.add_metric([row["model"]], row["held"])
        oldest.add_metric([row["model"]], row["held_s"])
    yield from (workers, held, oldest)
