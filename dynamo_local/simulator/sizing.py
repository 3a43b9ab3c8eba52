"""`dynamo plan`: how many workers keep targets under a load, found in the simulator with a measured profile.

The search begins with the smallest fleet and tries all splits of a size, until one keeps the targets. The result is
checked with other arrivals, and with engines slower and faster by the profile's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import BadInput
from dynamo_local.profile.document import Document, read_document
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import profile_folder
from dynamo_local.simulator.generator import GeneratorOptions, generate
from dynamo_local.simulator.metrics import Metrics, measure
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.process import Job
from dynamo_local.simulator.simulation import Case, run_cases
from dynamo_local.simulator.trace import TraceRequest

REQUESTS = 1500
"""Requests of a generated load. Enough to resolve tenths of a per cent."""
SEEDS = 3
AT_ONCE = 1e18
"""Bytes per second of a hand-off that takes no longer for a longer prompt."""
UNKNOWN_ERROR = 0.10
"""How far a profile may be off that says nothing about it."""

Traces = Callable[[int], Sequence[TraceRequest]]
"""The load, by seed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`attainment`: the share of requests with TTFT and mean ITL within the targets. `gpus`: of the host."""

    slo: Slo
    attainment: float = 0.95
    gpus: int = 8
    aggregated: bool = False


@dataclass(frozen=True, slots=True)
class Engines:
    """A profile's engines in the simulator. `error`: how far their times may be off, as a share.

    `beyond`: the time of a first token outside of the engine (`Document.beyond_engine`), for aggregated engines. With
    prefill and decode apart, the simulated hand-offs contain that time.
    """

    profile: str
    sim: SimOptions
    prefill_gpus: int
    decode_gpus: int
    error: float
    document: Document | None
    beyond: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tried:
    """A fleet, with the share that it attains."""

    shape: FleetShape
    gpus: int
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Planned:
    """`best` is the smallest fleet that attains what is wanted, else (`attained` false) the best of all. `lowest` and
    `highest` bound its attainment; `alternatives` are the other splits of its size."""

    best: Tried
    attained: bool
    lowest: float
    highest: float
    alternatives: tuple[Tried, ...]
    tried: int


def engines_of_profile(profile: str, *, aggregated: bool) -> Engines:
    """Raises `ConfigError` for a profile that cannot be used."""
    folder = profile_folder(profile)
    document = read_document(folder)
    kv = ProfileModel.load(profile).max_kv_tokens
    block = next((size for size in (64, 32, 16, 8, 4, 2) if kv % size == 0), 1)
    sim = SimOptions(profile=profile, block_size=block, num_gpu_blocks=kv // block)
    if document is None:
        return Engines(profile, sim, 1, 1, UNKNOWN_ERROR, None)
    role = "agg" if "agg" in document.engines else "decode"
    if aggregated and role != "agg":
        raise BadInput(f"the profile {profile} is of prefill and decode engines apart; leave --agg out")
    if role not in document.engines:
        raise BadInput(f"the profile {profile} has no {role} engine; measure all roles (`dynamo profile`)")
    engine = document.engines[role]
    sim = replace(
        sim,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=min(engine.context_length, engine.max_kv_tokens),
    )
    together = "prefill" not in document.engines
    if not together:
        sim = with_handoff(sim, document.beyond_engine)
    prefill = document.engines.get("prefill", engine)
    errors = document.certificate.held_out.values()
    return Engines(
        profile,
        sim,
        max(1, prefill.gpus),
        max(1, engine.gpus),
        median(errors) if errors else UNKNOWN_ERROR,
        document,
        document.beyond_engine if together else {},
    )


def with_handoff(sim: SimOptions, beyond: Mapping[str, float]) -> SimOptions:
    """Set the time of simulated hand-offs to the measured time of a first token outside of the engine.

    That time depends on the prompt's size and contains HTTP, as a client's TTFT does. Unmeasured ones stay.
    """
    if not beyond:
        return sim
    per_token_s = beyond["per_token_ms"] / 1000
    return replace(
        sim,
        kv_transfer_latency_s=beyond["overhead_ms"] / 1000,
        kv_transfer_bytes_per_s=sim.kv_bytes_per_token / per_token_s if per_token_s > 0 else AT_ONCE,
    )


def made(rate: float, isl: int, osl: int, sigma: float) -> Traces:
    """Poisson arrivals at that rate, with prompts and answers around those lengths."""
    options = GeneratorOptions(
        duration=REQUESTS / rate,
        rate=rate,
        cv=1.0,
        isl=isl,
        isl_sigma=sigma,
        isl_max=max(isl, min(131_072, 8 * isl)),
        osl=osl,
        osl_sigma=sigma,
        osl_max=8 * osl,
    )
    return lambda seed: list(generate(options.model_copy(update={"seed": seed})))


def plan(
    engines: Engines, wanted: Wanted, traces: Traces, tell: Callable[[str], None], jobs: int | None = None
) -> Planned:
    """With so many runs at once (None: one for each core). Raises `BadInput` where no fleet fits on the GPUs."""
    trace = traces(0)
    aggregated = wanted.aggregated or (engines.document is not None and "agg" in engines.document.engines)
    best: Tried | None = None
    count = 0
    for gpus, shapes in sizes(engines, wanted.gpus, aggregated=aggregated):
        tell(f"trying {', '.join(map(str, shapes))} ({gpus} GPUs)")
        found = _run(engines, shapes, trace, wanted.slo, jobs=jobs)
        count += len(found)
        found.sort(key=lambda tried: -tried.metrics.attainment)
        if best is None or found[0].metrics.attainment > best.metrics.attainment:
            best = found[0]
        if found[0].metrics.attainment >= wanted.attainment:
            lowest, highest = _bounds(engines, found[0].shape, traces, wanted.slo)
            return Planned(found[0], True, lowest, highest, tuple(found[1:]), count)
    if best is None:
        raise BadInput(
            f"no fleet fits on {wanted.gpus} GPUs: a prefill worker takes {engines.prefill_gpus} and a decode worker "
            f"{engines.decode_gpus}"
        )
    lowest, highest = _bounds(engines, best.shape, traces, wanted.slo)
    return Planned(best, False, lowest, highest, (), count)


def sizes(engines: Engines, gpus: int, *, aggregated: bool) -> Iterator[tuple[int, list[FleetShape]]]:
    """Fleets by the GPUs that they take, the fewest first."""
    by_size: dict[int, list[FleetShape]] = {}
    for decode in range(1, gpus // engines.decode_gpus + 1):
        left = gpus - decode * engines.decode_gpus
        for prefill in [0] if aggregated else range(1, left // engines.prefill_gpus + 1):
            taken = decode * engines.decode_gpus + prefill * engines.prefill_gpus
            by_size.setdefault(taken, []).append(FleetShape(prefill, decode))
    yield from sorted(by_size.items())


def _run(
    engines: Engines,
    shapes: Sequence[FleetShape],
    trace: Sequence[TraceRequest],
    slo: Slo,
    speed: float = 1.0,
    jobs: int | None = None,
) -> list[Tried]:
    cases = [Case(str(shape), _options(engines, shape, speed)) for shape in shapes]
    runs = list(run_cases(trace, cases, jobs))
    for run in runs:
        hear_later(run.jobs, engines.beyond)
    return [
        Tried(case.options.shape, case.options.gpus, measure(run, slo)) for case, run in zip(cases, runs, strict=True)
    ]


def hear_later(jobs: Iterable[Job], beyond: Mapping[str, float]) -> None:
    """A client has all tokens of an answer so much later than the engine, by the size of its prompt."""
    for job in jobs if beyond else ():
        later_s = (beyond["overhead_ms"] + beyond["per_token_ms"] * job.request.input_length) / 1000
        job.first_s = None if job.first_s is None else job.first_s + later_s
        job.last_s = None if job.last_s is None else job.last_s + later_s


def _options(engines: Engines, shape: FleetShape, speed: float) -> SimulationOptions:
    return SimulationOptions(
        shape=shape,
        sim=replace(engines.sim, speed=speed),
        gpus=shape.prefill * engines.prefill_gpus + shape.decode * engines.decode_gpus,
        prefill_gpus=engines.prefill_gpus,
        decode_gpus=engines.decode_gpus,
        disagg=DisaggSettings(),
        conditional=False,
    )


def _bounds(engines: Engines, shape: FleetShape, traces: Traces, slo: Slo) -> tuple[float, float]:
    """The least and the most of other arrivals, and of engines that are as much slower and quicker as they may be."""
    found = [_run(engines, [shape], traces(seed), slo)[0] for seed in range(1, SEEDS)]
    found += [_run(engines, [shape], traces(0), slo, speed)[0] for speed in (1 - engines.error, 1 + engines.error)]
    shares = [tried.metrics.attainment for tried in found]
    return min(shares), max(shares)


def section(engines: Engines, planned: Planned, wanted: Wanted, components: Mapping[str, str]) -> dict[str, Any]:
    """Sections for the configuration: the fleet, and a planner with these targets."""
    shape = planned.best.shape
    found: dict[str, Any] = {
        components.get("decode", "VllmWorker"): {"ServiceArgs": {"workers": shape.decode}},
    }
    if shape.prefill:
        found[components.get("prefill", "PrefillWorker")] = {"ServiceArgs": {"workers": shape.prefill}}
    targets = {"ttft-ms": wanted.slo.ttft_ms, "itl-ms": wanted.slo.itl_ms}
    profile = str(Path(engines.profile).resolve()) if engines.document is not None else engines.profile
    # The policy slo is for graphs with prefill workers of their own.
    policy = {"policy": "slo"} if shape.prefill else {"policy": "throughput-load", "optimization-target": "sla"}
    found["Planner"] = {
        **policy,
        "profile-results-dir": profile,
        "max-gpu-budget": wanted.gpus,
        **{name: value for name, value in targets.items() if value is not None},
    }
    return found


def load_of(trace: Sequence[TraceRequest]) -> str:
    """The load in words."""
    seconds = max(trace[-1].at_s, 1e-9)
    isl, osl = fmean(r.input_length for r in trace), fmean(r.output_length for r in trace)
    return f"{len(trace):,} requests, {len(trace) / seconds:.2f} per second, {isl:,.0f} tokens in, {osl:,.0f} out"


# --- comparing
# `dynamo plan` with several profiles, of engines that differ in GPUs (tensor parallelism) or in settings. Pure.
#
# Each profile gets its own smallest fleet (`sizing.plan`). The better one keeps the targets, with fewer GPUs. Between
# equals the one wins whose attainment is the highest where it is at its worst, then the one with the lower p95 of TTFT.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A profile with its fleet. `settings` are what tells its engines from the others', by role."""

    engines: Engines
    planned: Planned
    settings: Mapping[str, Mapping[str, Any]]

    @property
    def words(self) -> str:
        """`decode: 2 GPUs, max_num_seqs 64`; empty where nothing differs."""
        return "; ".join(
            f"{role}: {', '.join(_said(name, value) for name, value in of.items())}"
            for role, of in self.settings.items()
            if of
        )


def ranked(found: Sequence[tuple[Engines, Planned]]) -> list[Candidate]:
    """The best first."""
    settings = differing([engines.document for engines, _ in found])
    candidates = [Candidate(*each, of) for each, of in zip(found, settings, strict=True)]
    return sorted(candidates, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float, float, float]:
    planned = candidate.planned
    metrics = planned.best.metrics
    ttft_ms = math.inf if metrics.ttft_ms.p95 is None else metrics.ttft_ms.p95
    if not planned.attained:  # the best that there is, whatever it takes
        return True, -metrics.attainment, planned.best.gpus, ttft_ms
    return False, planned.best.gpus, -planned.lowest, ttft_ms


def differing(documents: Sequence[Document | None]) -> list[dict[str, dict[str, Any]]]:
    """For each profile: role -> `gpus` and the options that differ between the profiles.

    A profile that does not name its engines gets an empty entry.
    """
    known = [_settings_of(document) for document in documents]
    named = [of for of in known if of is not None]
    names = {
        role: _different([of[role] for of in named if role in of]) for role in {role for of in named for role in of}
    }
    return [
        {role: {name: engine.get(name) for name in names[role]} for role, engine in (of or {}).items()} for of in known
    ]


def _different(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for engine in engines for name in engine})
    return [name for name in names if any(engine.get(name) != engines[0].get(name) for engine in engines)]


def _settings_of(document: Document | None) -> dict[str, dict[str, Any]] | None:
    if document is None:
        return None
    return {role: {"gpus": engine.gpus, **engine.options} for role, engine in document.engines.items()}


def _said(name: str, value: Any) -> str:
    if name == "gpus":
        return f"{value} GPU{'' if value == 1 else 's'}"
    return f"{name} {'not set' if value is None else _plain(value)}"


def sections_of(candidate: Candidate, components: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Component -> options that select these engines: only those that differ between the profiles."""
    found: dict[str, dict[str, Any]] = {}
    for role, settings in candidate.settings.items():
        section: dict[str, Any] = {}
        for name, value in settings.items():
            if name == "gpus":
                section["ServiceArgs"] = {"resources": {"gpu": value}}
            elif value is not None:
                _put(section, name.split("."), _plain(value))
        if section:
            found[components.get(role, role)] = section
    return found


def _put(section: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """`sim.max_num_seqs` as `sim: {max_num_seqs: …}`; vLLM's own as it spells them."""
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1].replace("_", "-") if len(path) == 1 else path[-1]] = value


def _plain(value: Any) -> Any:
    """A profile keeps numbers as floats, and an engine takes no 64.0 for 64."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merged(section: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` into the section, whole."""
    found = dict(section)
    for name, value in more.items():
        old = found.get(name)
        found[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
