"""`dynamo profile` from its start to its end: measure, look at other things, fit, check, write."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from dynamo_local import __version__
from dynamo_local.components.engine_facts import engine_version
from dynamo_local.errors import DynamoError
from dynamo_local.measuring.actions import Acted, measured_actions
from dynamo_local.measuring.certification import Frontend, check
from dynamo_local.measuring.graph import MeasuredGraph, running
from dynamo_local.measuring.host import HostWatch, processors, share_processors
from dynamo_local.measuring.session import Session, Spending, spending
from dynamo_local.measuring.target import AGG, DECODE, PREFILL, Target
from dynamo_local.profile import judgement as certifying
from dynamo_local.profile.document import (
    FORMAT,
    CertificateFacts,
    Document,
    EngineFacts,
    GpuFacts,
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
from dynamo_local.profile.repetitions import Measured, Noticed, Progress, Rules, measured, noticed
from dynamo_local.system.gpus import open_inventory

KINDS: Mapping[str, tuple[Kind, ...]] = {
    PREFILL: (Kind.PREFILL, Kind.CACHED),
    DECODE: (Kind.DECODE,),
    AGG: (Kind.PREFILL, Kind.CACHED, Kind.DECODE, Kind.MIXED),
}
PATH_REPEATS = 5
PATH_ANSWER = 20


@dataclass(frozen=True, slots=True)
class Asked:
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
class Told:
    """What a run came to. `document` is None where it was broken off before it could be written; `why` says so."""

    document: Document | None
    progress: Progress
    stopped: bool
    why: str | None = None


Tell = Callable[[str], None]
TellPoint = Callable[[Progress, Point | None], None]


async def profile(target: Target, asked: Asked, tell: Tell, tell_point: TellPoint) -> Told:
    """Measure the target. Raises what it cannot be started with; SIGINT ends it in order."""
    wanted = {role: target.engines[role] for role in target.components}
    the_hash = configuration_hash(wanted)
    began_s = time.monotonic()
    rules = Rules(budget_s=asked.budget_s, seed=asked.seed)
    before = resumed(asked.folder, rules, the_hash) if asked.resume else None
    asked.folder.mkdir(parents=True, exist_ok=True)
    tell("starting the graph")
    async with running(target, tell) as graph:
        workers = {role: graph.workers(component) for role, component in target.components.items()}
        engines = {role: await graph.limits(found[0]) for role, found in workers.items()}
        limits = {role: each.within(asked.context_max) for role, each in engines.items()}
        by_kind = {kind: role for role in target.components for kind in _kinds(target, role)}
        inventory = open_inventory(graph.state.gpus, os.environ)
        shared = share_processors(target.engine_names, inventory)
        session = Session(
            graph,
            {kind: workers[role] for kind, role in by_kind.items()},
            {kind: limits[role] for kind, role in by_kind.items()},
            asked.folder,
            the_hash,
            tell_point,
            in_turn=shared,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, session.stop.set)
        spent = spending(asked.budget_s, time.monotonic() - began_s, graph.cold_s().values() if asked.actions else ())
        progress = before or Progress(tuple(_points(target, limits, asked)), rules)
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
                keep(asked.folder, progress, the_hash)
                return Told(None, progress, session.stop.is_set(), why)
            write_npz(asked.folder, prefill, decode)
            rest = await _rest(graph, target, asked, known, limits, engines, session, tell, watch, spent)
            if shared:
                rest.host.extend(processors())
    document = _document(target, asked, engines, known, graph, rest, the_hash, time.monotonic() - began_s)
    write_document(asked.folder, document)
    return Told(document, progress, False)


def _ahead(points: int, spent: Spending) -> str:
    actions = f", then actions, about {spent.actions_s:.0f} s" if spent.actions_s else ""
    return f"measuring {points} points, at most {spent.points_s:.0f} s; then a trace of {spent.trace_s:.0f} s{actions}"


def _kinds(target: Target, role: str) -> list[Kind]:
    """A server that is measured from outside tells of no pass what was in it."""
    outside = target.runtime_of(target.components[role]) is not None
    without = {Kind.MIXED} if outside else set()
    without |= set() if target.has_prefix_cache(role) else {Kind.CACHED}
    return [kind for kind in KINDS[role] if kind not in without]


def _points(target: Target, limits: Mapping[str, Limits], asked: Asked) -> list[Point]:
    usual = (5, 3) if asked.small else (PREFILL_STEPS, DECODE_STEPS)
    steps = (asked.prefill_steps or usual[0], asked.decode_steps or usual[1])
    return [point for role, each in limits.items() for point in sweep(each, _kinds(target, role), steps)]


def _curves(target: Target, known: Mapping[Point, Measured], engines: Mapping[str, Limits]) -> Any:
    """Of prefill and of decode; empty where the role is not measured."""
    first, second = (AGG, AGG) if target.standalone else (PREFILL, DECODE)
    prefill = prefill_points(known, target.gpus_of(first) if first in engines else 1)
    kv = engines[second].max_kv_tokens if second in engines else 1
    return prefill, decode_points(known, kv, target.gpus_of(second) if second in engines else 1)


@dataclass(frozen=True, slots=True)
class _Rest:
    """What a profile has besides its points."""

    path: list[PathFacts]
    actions: Acted
    held_out: certifying.HeldOut
    trace: list[certifying.Compared] | str
    host: list[Noticed]


async def _rest(
    graph: MeasuredGraph,
    target: Target,
    asked: Asked,
    known: Mapping[Point, Measured],
    limits: Mapping[str, Limits],
    engines: Mapping[str, Limits],
    session: Session,
    tell: Tell,
    watch: HostWatch,
    spent: Spending,
) -> _Rest:
    role = AGG if target.standalone else DECODE
    kv = engines[role].max_kv_tokens if role in engines else 1
    held = certifying.held_out(known, kv, asked.seed)
    path: list[PathFacts] = []
    trace: list[certifying.Compared] | str = "it was stopped before the trace"
    if held.why_not is None and graph.frontend_url is not None and role in engines:
        tell("measuring the way over HTTP")
        prefill, decode = _curves(target, known, engines)
        lengths = path_lengths(limits[role].context_length, apart=not target.standalone)
        path = await _path(graph, model_of(prefill, decode), lengths)
        if not session.stop.is_set():
            tell(f"checking it with a mixed trace of {spent.trace_s:.0f} s, here and in the twin")
            trace = await check(graph, asked.folder, limits, path, spent.trace_s, asked.seed)
    elif held.why_not is not None:
        trace = "no curves to run the twin by"
    host, actions = watch.noticed(), Acted({}, {})  # of the measurement: actions are work of our own
    if asked.actions and not session.stop.is_set():
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


# --- the document ------------------------------------------------------------------------------


def _document(
    target: Target,
    asked: Asked,
    engines: Mapping[str, Limits],
    known: Mapping[Point, Measured],
    graph: MeasuredGraph,
    rest: _Rest,
    the_hash: str,
    seconds: float,
) -> Document:
    told = certifying.certificate(rest.held_out, rest.trace)
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
            state=told.state,
            where=list(told.where),
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
