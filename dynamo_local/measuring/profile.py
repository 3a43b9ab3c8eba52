"""`dynamo profile` from its start to its end: measure, look at other things, fit, check, write."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, cast
from zlib import crc32

from dynamo_local import __version__
from dynamo_local.components.engine_facts import engine_version
from dynamo_local.core.types import Missing
from dynamo_local.engines.base import host_bytes
from dynamo_local.errors import DynamoError, GpuError
from dynamo_local.measuring.certification import Frontend, check
from dynamo_local.measuring.graph import GraphFailed, MeasuredGraph, Worker, dynamo, running
from dynamo_local.measuring.host import HostWatch, gpu_bytes, processors, share_processors
from dynamo_local.measuring.repetition import TIMEOUT_S, request_of, sample_of
from dynamo_local.measuring.target import AGG, DECODE, PREFILL, Target
from dynamo_local.profile import judgement as certifying
from dynamo_local.profile.document import (
    FORMAT,
    CertificateFacts,
    Document,
    EngineFacts,
    GpuFacts,
    MemoryFacts,
    PathFacts,
    PointFacts,
    configuration_hash,
    keep,
    resumed,
    write_document,
    write_npz,
)
from dynamo_local.profile.fit import (
    beyond,
    decode_fit,
    decode_points,
    model_of,
    prefill_fit,
    prefill_points,
    sum_error,
    usable,
)
from dynamo_local.profile.points import (
    CONTEXT_MAX,
    DECODE_STEPS,
    PREFILL_STEPS,
    Kind,
    Limits,
    Point,
    path_lengths,
    sweep,
)
from dynamo_local.profile.reading import DecodePoints, PrefillPoints
from dynamo_local.profile.repetitions import Measured, Noticed, Progress, Rules, Sample, measured, noticed
from dynamo_local.system.gpus import Inventory, open_inventory
from dynamo_local.system.processes import family_of

# How long a graph's own actions take on this host. The arbiter carries each out once, and times it.
#
# Cold starts are timed when the graph comes up. One more worker and one less of each component time spares and drains.
# Flips and sleeps are tried where the configuration has them. The memory of a worker in each state is measured as well.

ACTION_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Acted:
    """Seconds, by component and by what was done; bytes, by component and state (`ready`, `asleep_1`, …)."""

    seconds: dict[str, dict[str, float]]
    memory: dict[str, dict[str, MemoryFacts]]


async def measured_actions(
    graph: MeasuredGraph, inventory: Inventory, tell: Callable[[str], None], until_s: float
) -> Acted:
    """Time each action once. A refused one (no free GPU) is reported and skipped.

    A start that would end after `until_s` (monotonic, s) is skipped, too.
    """
    cold_s, drains = graph.cold_s(), dict[str, float]()
    memory: dict[str, dict[str, MemoryFacts]] = {}
    for component in dict.fromkeys(graph.target.components.values()):
        try:
            memory[component] = await _memory(graph, component, inventory)
            takes_s, left_s = cold_s.get(component, 0.0), until_s - time.monotonic()
            if takes_s > left_s:
                left = f"{max(0.0, left_s):.0f} s of the budget are left"
                tell(f"not timed: one more {component} takes {takes_s:.0f} s, and {left}")
            else:
                await _one_more_and_one_less(graph, component, drains, tell)
            await _flip(graph, component, tell)
            memory[component] |= await _sleep(graph, component, tell)
        except GraphFailed as error:  # what was measured before is not lost for it
            tell(f"not timed: {component}: {error}")
    found: dict[str, dict[str, float]] = {}
    with contextlib.suppress(GraphFailed):  # then what it told last
        await graph.look()
    for row in graph.status["lead_times"]:
        if row["component"] in graph.target.components.values() and row["run"] is not None:
            found.setdefault(row["component"], {})[row["rung"]] = row["run"]["median_s"]
    for component, seconds in drains.items():
        found.setdefault(component, {})["drain"] = round(seconds, 4)
    return Acted(found, {component: states for component, states in memory.items() if states})


async def _memory(graph: MeasuredGraph, component: str, inventory: Inventory) -> dict[str, MemoryFacts]:
    """The first ready worker of a component."""
    await graph.look()
    ready = graph.workers(component)
    if not ready:
        return {}
    try:
        devices = await asyncio.to_thread(inventory.sample)
    except GpuError:
        devices = ()
    pid = graph.pid(ready[0])
    found = await asyncio.to_thread(lambda: host_bytes(family_of(pid)))
    host = None if isinstance(found, Missing) else found
    return {"ready": MemoryFacts(vram_bytes=gpu_bytes(pid, devices), host_bytes=host)}


async def _one_more_and_one_less(
    graph: MeasuredGraph, component: str, drains: dict[str, float], tell: Callable[[str], None]
) -> None:
    if await _tried(graph, tell, "scale", component, "+1", "--wait"):
        began_s = time.monotonic()
        if await _tried(graph, tell, "scale", component, "-1", "--wait"):
            drains[component] = time.monotonic() - began_s


async def _flip(graph: MeasuredGraph, component: str, tell: Callable[[str], None]) -> None:
    """There and back."""
    service = next(each for each in graph.target.spec.services if each.name == component)
    if service.flips_to is None or service.flips_to not in graph.target.components.values():
        return
    name = _short(graph, component)
    if name is not None and await _tried(graph, tell, "flip", name, "--force", "--wait"):
        await graph.look()
        flipped = _short(graph, service.flips_to, last=True)
        if flipped is not None:
            await _tried(graph, tell, "flip", flipped, "--force", "--wait")


async def _sleep(graph: MeasuredGraph, component: str, tell: Callable[[str], None]) -> dict[str, MemoryFacts]:
    """Sleep and wake at each level in turn. The arbiter has measured the memory that a sleeper keeps."""
    service = next(each for each in graph.target.spec.services if each.name == component)
    if service.standby is None:
        return {}
    found = {}
    for level in ("1", "2"):
        await graph.look()
        name = _short(graph, component)
        if name is None or not await _tried(graph, tell, "sleep", name, "--level", level, "--force", "--wait"):
            continue
        for each in (await graph.look())["workers"]:
            if each["watcher_name"].endswith(f"_{name}") and each["standby"] is not None:
                kept = each["standby"]
                facts = MemoryFacts(vram_bytes=kept["vram_bytes"], host_bytes=kept["host_bytes"])
                found[f"asleep_{kept['level'] or level}"] = facts
        await _tried(graph, tell, "wake", name, "--wait")
    return found


def _short(graph: MeasuredGraph, component: str, *, last: bool = False) -> str | None:
    """A worker's name without the namespace."""
    names = [worker.name.removeprefix(f"{graph.target.namespace}_") for worker in graph.workers(component)]
    return names[-1 if last else 0] if names else None


async def _tried(graph: MeasuredGraph, tell: Callable[[str], None], *words: Any) -> bool:
    tell(f"timing: dynamo {' '.join(words[:3])}")
    try:
        await dynamo(*words, "--namespace", graph.target.namespace, timeout_s=ACTION_TIMEOUT_S)
    except GraphFailed as error:
        tell(f"not timed: {error}")
        return False
    return True


KEEP_EVERY_S = 2.0
WARM_UP = 2
"""Repetitions of a small and a large point on each worker that nobody counts: caches, graphs and clocks warm up."""


class Session:
    """Measures the points of `progress` on the workers of the point's kind.

    All workers of a kind repeat a point at once. `in_turn`: one after the other, because they share processors. `stop`
    ends the session after the current repetition.
    """

    def __init__(
        self,
        graph: MeasuredGraph,
        workers: Mapping[Kind, Sequence[Worker]],
        limits: Mapping[Kind, Limits],
        folder: Path,
        configuration_hash: str,
        tell: Callable[[Progress, Point | None], None],
        *,
        in_turn: bool = False,
    ) -> None:
        self._graph = graph
        self._workers = workers
        self._limits = limits
        self._folder = folder
        self._hash = configuration_hash
        self._tell = tell
        self._in_turn = in_turn
        self.stop = asyncio.Event()

    async def run(self, progress: Progress) -> Progress:
        """Run until the end or `stop`. A refusal of the engine counts as a failure of its point."""
        began_s, kept_s = time.monotonic() - progress.elapsed_s, time.monotonic()
        await self._warm_up(progress)
        while not self.stop.is_set() and (point := progress.next_point()) is not None:
            self._tell(progress, point)
            at_s = time.monotonic()
            try:
                samples, failure = await self._repeat(point, progress, at_s - began_s), None
            except DynamoError as error:
                samples, failure = [], str(error)
            progress = progress.noted(point, samples, time.monotonic() - at_s, failure)
            if time.monotonic() - kept_s > KEEP_EVERY_S:
                keep(self._folder, progress, self._hash)
                kept_s = time.monotonic()
        keep(self._folder, progress, self._hash)
        self._tell(progress, None)
        return progress

    async def _warm_up(self, progress: Progress) -> None:
        for kind in self._workers:
            points = sorted((p for p in progress.points if p.kind is kind), key=lambda point: point.cost)
            for point in points[:1] + points[len(points) // 2 : len(points) // 2 + 1]:
                for _ in range(WARM_UP):
                    with contextlib.suppress(DynamoError):  # the same refusal comes again, and is noted then
                        await self._on_all(point, seed=-1, at_s=0.0)

    async def _repeat(self, point: Point, progress: Progress, at_s: float) -> list[Sample]:
        seed = crc32(f"{progress.rules.seed}/{point}/{len(progress.of(point).samples)}".encode())
        return await self._on_all(point, seed, at_s)

    async def _on_all(self, point: Point, seed: int, at_s: float) -> list[Sample]:
        workers = self._workers[point.kind]
        if self._in_turn:
            return [await self._one(worker, point, seed, at_s) for worker in workers]
        measuring = (self._one(worker, point, seed, at_s) for worker in workers)
        found = await asyncio.gather(*measuring, return_exceptions=True)  # the next repetition runs beside no straggler
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return cast(list[Sample], found)

    async def _one(self, worker: Worker, point: Point, seed: int, at_s: float) -> Sample:
        request = request_of(point, self._limits[point.kind], seed & 0x7FFFFFFF)
        answer = await self._graph.measure(worker, request, TIMEOUT_S + 10.0)
        return sample_of(point, answer, request, worker.name, at_s)


# How the budget of a measurement is divided, once the duration of the start is known. Pure.

TRACE_SHARE = 1 / 3
"""Share of the measuring time for the trace that checks the profile. At most five minutes."""
TRACE_MAX_S = 300.0
START_SHARE_MAX = 0.5
"""A start that takes more of the budget does so beside it: a profile of no points is none."""
ACTIONS_SHARE_MAX = 1 / 3
"""Share of the time that the start leaves."""
ACTION_S = 15.0
"""Time for the commands around one more worker and one less, s."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds for the points, for the trace, and kept for actions."""

    points_s: float
    trace_s: float
    actions_s: float


def spending(budget_s: float, started_s: float, cold_s: Collection[float]) -> Budget:
    """Divides `budget_s` seconds.

    `started_s`: seconds that the start took. `cold_s`: seconds of the cold start of each component that is timed once
    more. Empty: no actions are timed.
    """
    left_s = max(budget_s * (1 - START_SHARE_MAX), budget_s - started_s)
    actions_s = min(left_s * ACTIONS_SHARE_MAX, sum(each + ACTION_S for each in cold_s))
    trace_s = min(TRACE_MAX_S, (left_s - actions_s) * TRACE_SHARE)
    return Budget(left_s - actions_s - trace_s, trace_s, actions_s)


KINDS: Mapping[str, tuple[Kind, ...]] = {
    PREFILL: (Kind.PREFILL, Kind.CACHED),
    DECODE: (Kind.DECODE,),
    AGG: (Kind.PREFILL, Kind.CACHED, Kind.DECODE, Kind.MIXED),
}
PATH_REPEATS = 5
PATH_ANSWER = 20


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The command line, understood."""

    folder: Path
    budget_s: float
    context_max: int = CONTEXT_MAX
    small: bool = False
    resume: bool = False
    actions: bool = True
    seed: int = 0
    prefill_steps: int | None = None
    """Prompt lengths in the prefill sweep; None: 16, or 5 of a small sweep."""
    decode_steps: int | None = None
    """Contexts in the decode sweep, and loads of each; None: 6, or 3 of a small sweep."""


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The result of a run. `document` is None if the run ended before it could be written. `why` is the reason."""

    document: Document | None
    progress: Progress
    stopped: bool
    why: str | None = None


Tell = Callable[[str], None]
TellPoint = Callable[[Progress, Point | None], None]


async def profile(target: Target, request: ProfileRequest, tell: Tell, tell_point: TellPoint) -> ProfileResult:
    """Measure the target. Raises what it cannot be started with; SIGINT ends it in order."""
    wanted = {role: target.engines[role] for role in target.components}
    the_hash = configuration_hash(wanted)
    began_s = time.monotonic()
    rules = Rules(budget_s=request.budget_s, seed=request.seed)
    before = resumed(request.folder, rules, the_hash) if request.resume else None
    request.folder.mkdir(parents=True, exist_ok=True)
    tell("starting the graph")
    async with running(target, tell) as graph:
        workers = {role: graph.workers(component) for role, component in target.components.items()}
        engines = {role: await graph.limits(found[0]) for role, found in workers.items()}
        limits = {role: each.within(request.context_max) for role, each in engines.items()}
        by_kind = {kind: role for role in target.components for kind in _kinds(target, role)}
        inventory = open_inventory(graph.state.gpus, os.environ)
        shared = share_processors(target.engine_names, inventory)
        session = Session(
            graph,
            {kind: workers[role] for kind, role in by_kind.items()},
            {kind: limits[role] for kind, role in by_kind.items()},
            request.folder,
            the_hash,
            tell_point,
            in_turn=shared,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, session.stop.set)
        spent = spending(
            request.budget_s, time.monotonic() - began_s, graph.cold_s().values() if request.actions else ()
        )
        progress = before or Progress(tuple(_points(target, limits, request)), rules)
        progress = replace(progress, rules=replace(rules, budget_s=spent.points_s))
        tell(_ahead(len(progress.points), spent))
        watch = HostWatch(graph.ours, inventory)
        async with watch.watching():
            progress = await session.run(progress)
            known = measured(progress)
            prefill, decode = _curves(target, known, engines)
            both = {PREFILL, DECODE} <= target.components.keys() or target.standalone
            why = usable(prefill, decode) if both else None
            if session.stop.is_set() or why is not None:
                keep(request.folder, progress, the_hash)
                return ProfileResult(None, progress, session.stop.is_set(), why)
            write_npz(request.folder, prefill, decode)
            rest = await _rest(graph, target, request, known, limits, engines, session, tell, watch, spent)
            if shared:
                rest.host.extend(processors())
    document = _document(target, request, engines, known, graph, rest, the_hash, time.monotonic() - began_s)
    write_document(request.folder, document)
    return ProfileResult(document, progress, False)


def _ahead(points: int, spent: Budget) -> str:
    actions = f", then actions, about {spent.actions_s:.0f} s" if spent.actions_s else ""
    return f"measuring {points} points, at most {spent.points_s:.0f} s; then a trace of {spent.trace_s:.0f} s{actions}"


def _kinds(target: Target, role: str) -> list[Kind]:
    """A server that is measured from outside tells of no pass what was in it."""
    outside = target.runtime_of(target.components[role]) is not None
    without = {Kind.MIXED} if outside else set()
    without |= set() if target.has_prefix_cache(role) else {Kind.CACHED}
    return [kind for kind in KINDS[role] if kind not in without]


def _points(target: Target, limits: Mapping[str, Limits], request: ProfileRequest) -> list[Point]:
    usual = (5, 3) if request.small else (PREFILL_STEPS, DECODE_STEPS)
    steps = (request.prefill_steps or usual[0], request.decode_steps or usual[1])
    return [point for role, each in limits.items() for point in sweep(each, _kinds(target, role), steps)]


def _curves(target: Target, known: Mapping[Point, Measured], engines: Mapping[str, Limits]) -> Any:
    """Role -> workers. Empty for a role that is not measured."""
    first, second = (AGG, AGG) if target.standalone else (PREFILL, DECODE)
    prefill = prefill_points(known, target.gpus_of(first) if first in engines else 1)
    kv = engines[second].max_kv_tokens if second in engines else 1
    return prefill, decode_points(known, kv, target.gpus_of(second) if second in engines else 1)


@dataclass(frozen=True, slots=True)
class _Rest:
    """The parts of a profile besides its points."""

    path: list[PathFacts]
    actions: Acted
    held_out: certifying.HeldOut
    trace: list[certifying.Compared] | str
    host: list[Noticed]


async def _rest(
    graph: MeasuredGraph,
    target: Target,
    request: ProfileRequest,
    known: Mapping[Point, Measured],
    limits: Mapping[str, Limits],
    engines: Mapping[str, Limits],
    session: Session,
    tell: Tell,
    watch: HostWatch,
    spent: Budget,
) -> _Rest:
    role = AGG if target.standalone else DECODE
    kv = engines[role].max_kv_tokens if role in engines else 1
    held = certifying.held_out(known, kv, request.seed)
    path: list[PathFacts] = []
    trace: list[certifying.Compared] | str = "it was stopped before the trace"
    if held.why_not is None and graph.frontend_url is not None and role in engines:
        tell("measuring the way over HTTP")
        prefill, decode = _curves(target, known, engines)
        lengths = path_lengths(limits[role].context_length, apart=not target.standalone)
        path = await _path(graph, model_of(prefill, decode), lengths)
        if not session.stop.is_set():
            tell(f"checking it with a mixed trace of {spent.trace_s:.0f} s, here and in the twin")
            trace = await check(graph, request.folder, limits, path, spent.trace_s, request.seed)
    elif held.why_not is not None:
        trace = "no curves to run the twin by"
    host, actions = watch.noticed(), Acted({}, {})  # of the measurement: actions are work of our own
    if request.actions and not session.stop.is_set():
        inventory = open_inventory(graph.state.gpus, os.environ)
        actions = await measured_actions(graph, inventory, tell, time.monotonic() + spent.actions_s)
    return _Rest(path, actions, held, trace, host)


async def _path(graph: MeasuredGraph, model: Any, lengths: Sequence[int]) -> list[PathFacts]:
    """A few lengths over HTTP, one request at a time, beside what the engine itself takes."""
    assert graph.frontend_url is not None
    found, random = [], Random(1)
    try:
        async with Frontend(graph.frontend_url) as frontend:
            for tokens in lengths:
                answers = [await frontend.ask(tokens, PATH_ANSWER, random) for _ in range(PATH_REPEATS)]
                got = [each for each in answers if each is not None]
                gaps = [each.itl_ms for each in got if each.itl_ms is not None]
                if got:
                    found.append(
                        PathFacts(
                            tokens=tokens,
                            ttft_ms=median(each.ttft_ms for each in got),
                            engine_ttft_ms=model.ttft_s(tokens) * 1000,
                            itl_ms=median(gaps) if gaps else None,
                            engine_itl_ms=model.itl_s(tokens, tokens) * 1000,
                        )
                    )
    except DynamoError:
        return found
    return found


def _document(
    target: Target,
    request: ProfileRequest,
    engines: Mapping[str, Limits],
    known: Mapping[Point, Measured],
    graph: MeasuredGraph,
    rest: _Rest,
    the_hash: str,
    seconds: float,
) -> Document:
    certificate = certifying.certificate(rest.held_out, rest.trace)
    used = {worker for each in known.values() for sample in each.samples for worker in [sample.worker]}
    held = {gpu for role in target.components for w in graph.workers(target.components[role]) for gpu in w.gpus}
    gpus = [
        GpuFacts(gpu["name"], gpu["uuid"])
        for gpu in graph.status["gpus"]
        if str(gpu["index"]) in held or gpu["worker"] in used
    ]
    return Document(
        format=FORMAT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        configuration_hash=the_hash,
        engines={role: _engine(target, role, engines[role]) for role in target.components},
        gpus=gpus,
        driver=_driver(),
        versions=_versions(target),
        points=[_point(point, each, _over(target, point)) for point, each in known.items()],
        fit=_fit(known, *_curves(target, known, engines)),
        end_to_end=rest.path,
        actions=rest.actions.seconds,
        memory=rest.actions.memory,
        beyond_engine=_beyond(rest.path),
        noticed=[each.text for each in (*noticed(known), *rest.host)],
        certificate=CertificateFacts(
            state=certificate.state,
            where=list(certificate.where),
            held_out={name: round(error, 5) for name, error in rest.held_out.errors.items()},
            trace=[] if isinstance(rest.trace, str) else [{**asdict(c), "error": c.error} for c in rest.trace],
        ),
    )


def _beyond(path: Sequence[PathFacts]) -> dict[str, float]:
    if not path:
        return {}
    fixed_ms, per_token_ms = beyond([(each.tokens, each.ttft_ms - each.engine_ttft_ms) for each in path])
    return {"overhead_ms": fixed_ms, "per_token_ms": per_token_ms}


def _engine(target: Target, role: str, limits: Limits) -> EngineFacts:
    described = target.engines[role]
    return EngineFacts(
        component=target.components[role],
        engine=described["engine"],
        version=engine_version(described["engine"]),
        gpus=described["gpus"],
        options=dict(described["options"]),
        max_kv_tokens=limits.max_kv_tokens,
        context_length=limits.context_length,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def _versions(target: Target) -> dict[str, str]:
    engines = {target.engines[role]["engine"] for role in target.components}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"dynamo-local": __version__, "python": python, **{name: engine_version(name) for name in sorted(engines)}}


def _driver() -> str | None:
    """The NVIDIA driver's version; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _over(target: Target, point: Point) -> str:
    """Where that point was measured."""
    role = AGG if target.standalone else DECODE if point.kind is Kind.DECODE else PREFILL
    return "engine" if target.runtime_of(target.components[role]) is None else "http"


def _point(point: Point, each: Measured, over: str) -> PointFacts:
    found = each.interval
    assert found is not None
    count = len(each.samples)
    return PointFacts(
        kind=point.kind.value,
        tokens=point.tokens,
        cached=point.cached,
        requests=sum(sample.requests for sample in each.samples) / count,
        kv_tokens=sum(sample.kv_tokens for sample in each.samples) / count,
        mean_ms=found.mean,
        half_width_ms=found.half_width if count > 1 else None,
        repetitions=[sample.value_ms for sample in each.samples],
        workers=[sample.worker for sample in each.samples],
        over=over,
        chunk=point.chunk,
    )


def _fit(known: Mapping[Point, Measured], prefill: PrefillPoints, decode: DecodePoints) -> dict[str, dict[str, float]]:
    rows: dict[Kind, list[tuple[float, ...]]] = {kind: [] for kind in Kind}
    for point, each in known.items():
        assert each.interval is not None
        if point.kind in (Kind.DECODE, Kind.MIXED):
            kv = sum(sample.kv_tokens for sample in each.samples) / len(each.samples)
            rows[point.kind].append((kv, float(point.requests), each.interval.mean))
        else:
            rows[point.kind].append((float(point.tokens), each.interval.mean))
    fits: Sequence[tuple[str, Any]] = [
        ("prefill", prefill_fit(rows[Kind.PREFILL])),  # type: ignore[arg-type]  # two columns each
        ("decode", decode_fit(rows[Kind.DECODE])),  # type: ignore[arg-type]  # three
    ]
    if usable(prefill, decode) is None:
        fits = [*fits, ("mixed", sum_error(known, model_of(prefill, decode)))]
    return {name: asdict(fit) for name, fit in fits if fit is not None}
