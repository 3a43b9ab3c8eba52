"""The runs of the contest, one after the other, each kept as soon as it is done: another call goes on where this ended.

Rows of a trial are served alike: least-loaded routing, every prefill remote, cold starts only. The `SERVED` ones have
the routing and dispatch by targets that `dynamo serve` has by default.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contest.clairvoyant import clairvoyant
from benchmarks.contest.kept import KeptRows
from benchmarks.contest.trials import TRIALS, Fleet, Trial
from benchmarks.harness import machine, machine_line
from benchmarks.traces import Requests
from dynamo_local.components.dispatcher import sim_picker
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.core.routing.estimates import Targets
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.queueing import Demand, Engine, EngineOptions, decode_share, done_at, prefill_share
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile
from dynamo_local.simulator.metrics import Metrics, measure
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, Simulation, run_case

SLO, OURS, DYNAMOS = "slo", "throughput-load", "Dynamo's planner"
REPLAYED = (SLO, OURS, DYNAMOS)
"""The planners that are run in Dynamo's replay."""
POLICIES = ("load", "sla", OURS, SLO)
CLAIRVOYANT, FIXED = "clairvoyant", "fixed"
SERVED = {"sla as served": "sla", "load as served": "load"}
"""The policies of rows with dispatch by targets."""
CASES = (FIXED, CLAIRVOYANT, *SERVED, *POLICIES)
TWIN, REPLAY = "our twin", "Dynamo's replay"
ENOUGH = 0.9995
"""A fixed fleet that serves so many is the last of the frontier: more GPUs cannot do better."""
LEAST = 0.01
"""A fixed fleet that would serve fewer, by the queueing model, is not run."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run. `fleet` is that of its start, and of its whole life where `case` is "fixed". Latencies in ms."""

    judge: str
    trial: str
    case: str
    fleet: tuple[int, int]
    requests: int
    attainment: float
    gpu_hours: float
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    dropped: int
    scale_actions: int
    took_s: float
    source: str
    date: str
    machine: str

    @property
    def key(self) -> tuple[str, str, str, tuple[int, int], int]:
        """Two runs with the same key are the same."""
        return (self.judge, self.trial, self.case, self.fleet, self.requests)


class Facts(KeptRows[Row]):
    """The rows of a page."""

    __slots__ = ()

    @staticmethod
    def row_of(told: dict[str, Any]) -> Row:
        return Row(**{**told, "fleet": tuple(told["fleet"])})

    def of(self, judge: str, trial: str, case: str | None = None) -> list[Row]:
        """Those of a trial, by GPU-hours."""
        found = [row for row in self.rows if (row.judge, row.trial) == (judge, trial)]
        return sorted((row for row in found if case in (None, row.case)), key=lambda row: row.gpu_hours)


@dataclass(frozen=True, slots=True)
class Run:
    """One run that can be made."""

    trial: Trial
    case: str
    fleet: Fleet


def measure_all(
    facts: Facts,
    names: Sequence[str],
    cases: Sequence[str],
    limit: int | None,
    until_s: float,
    say: Callable[[str], None],
) -> bool:
    """All runs of the trials with these names and of these cases (none: of all) that are not kept yet; whether none is
    left. None is begun after `until_s` (`time.monotonic`)."""
    for trial in TRIALS:
        if names and trial.name not in names:
            continue
        requests = trial.requests(limit)
        for run in _runs(trial, requests, facts, cases or CASES):
            if time.monotonic() >= until_s:
                return False
            row = _made(run, requests)
            facts.add(row)
            say(
                f"{trial.name}, {run.case} from {FleetShape(*run.fleet)}: {row.attainment:.2%} at {row.gpu_hours:.3f} "
                f"GPU-hours, {row.took_s:.0f} s"
            )
    return True


def _runs(trial: Trial, requests: Requests, facts: Facts, cases: Sequence[str]) -> Iterator[Run]:
    """Those that are missing: fixed fleets first, the smallest first, then who knows the demand, then planners."""
    done = {row.key: row for row in facts.rows}
    count = len(requests.rows)
    for fleet in frontier(trial, requests) if FIXED in cases else ():
        row = done.get((TWIN, trial.name, FIXED, fleet, count))
        if row is None:
            yield Run(trial, FIXED, fleet)
            row = facts.rows[-1]
        if row.attainment >= ENOUGH:
            break
    for case in CASES:
        known = any(key[:3] == (TWIN, trial.name, case) and key[4] == count for key in done)
        if case in cases and case != FIXED and not known:
            yield Run(trial, case, trial.first)


def frontier(trial: Trial, requests: Requests) -> list[Fleet]:
    """The best split of each number of GPUs up to the cap, by the queueing model on the whole trace: all splits of all
    numbers would be a hundred runs. Those are left out that it takes for hopeless."""
    options = slo_of(trial)
    engine = Engine(passes_of(DEFAULT_PROFILE, trial.speed), EngineOptions())
    rows = requests.rows
    rate = len(rows) / max(rows[-1].at_s, 1.0)
    times = [each.at_s * rate for each in rows]
    gaps = tuple(after - before for before, after in zip((times[0], *times), times, strict=False))
    demand = Demand(gaps, tuple(row.input_length for row in rows), tuple(row.output_length for row in rows))
    ttft_s, itl_s = options.ttft_ms / 1000, options.itl_ms / 1000
    prefill = lru_cache(lambda n: prefill_share(demand, rate, n, engine, ttft_s, engine.itl_s(2048, 2048)))
    streams = done_at(demand.times(rate), demand.isl, trial.cap, engine)
    decode = lru_cache(lambda n: decode_share(demand, streams, n, engine, itl_s))
    found, fleet = [], (1, 1)
    while sum(fleet) <= trial.cap:
        if min(prefill(fleet[0]), decode(fleet[1])) >= LEAST or sum(fleet) == trial.cap:
            found.append(fleet)
        if sum(fleet) == trial.cap:
            break
        more = (fleet[0] + 1, fleet[1]), (fleet[0], fleet[1] + 1)
        fleet = max(more, key=lambda each: (min(prefill(each[0]), decode(each[1])), prefill(each[0]) + decode(each[1])))
    return found


def _made(run: Run, requests: Requests) -> Row:
    began_s = time.monotonic()
    trial = run.trial
    options = SimulationOptions(
        shape=FleetShape(*run.fleet),
        sim=SimOptions(speed=trial.speed),
        gpus=trial.cap,
        start_up_s=trial.start_up_s,
        conditional=False,
    )
    fleet = run.fleet
    if run.case == FIXED:
        done = run_case(requests.rows, Case("", options))
    elif run.case == CLAIRVOYANT:
        knows = clairvoyant(requests.rows, slo_of(trial), trial.start_up_s, trial.speed)
        fleet = knows.start
        begun = replace(options, shape=FleetShape(*fleet))
        done = Simulation(begun, requests.rows, planner=PolicyDriver(knows, 0.0)).run()
    else:
        with TemporaryDirectory() as folder:
            planner = planner_options(trial, SERVED.get(run.case, run.case), Path(folder))
            case = Case("", options, planner=planner, make_policy=_maker(trial))
            done = run_case(requests.rows, _as_served(case, trial.slo) if run.case in SERVED else case)
    return _row(run, fleet, measure(done, trial.slo), requests, time.monotonic() - began_s)


def _as_served(case: Case, slo: Slo) -> Case:
    """With the routing and dispatch of `dynamo serve --ttft --itl`."""
    targets = Targets.of_ms(slo.ttft_ms, slo.itl_ms)
    options = replace(case.options, conditional=True, disagg_policy="slo", targets=targets)
    return replace(case, options=options, make_picker=partial(sim_picker, "slo", 0, options.sim, targets))


def _row(run: Run, fleet: Fleet, metrics: Metrics, requests: Requests, took_s: float) -> Row:
    return Row(
        judge=TWIN,
        trial=run.trial.name,
        case=run.case,
        fleet=fleet,
        requests=metrics.requests,
        attainment=metrics.attainment,
        gpu_hours=metrics.gpu_hours,
        ttft_p99_ms=metrics.ttft_ms.p99,
        itl_p99_ms=metrics.itl_ms.p99,
        dropped=metrics.dropped,
        scale_actions=metrics.scale_actions,
        took_s=took_s,
        source=requests.told,
        date=today(),
        machine=here(),
    )


def _maker(trial: Trial) -> Callable[[PlannerConfig], Policy[Any]]:
    return partial(policy_of, start_up_s=trial.start_up_s, speed=trial.speed)


def today() -> str:
    """For a row."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def here() -> str:
    """The machine, without its load of now."""
    return machine_line(machine()).partition("  ")[2].partition(", load")[0]


def slo_of(trial: Trial) -> PlannerConfig:
    """The options of the policy `slo`, with the profile of its engines."""
    return PlannerConfig(
        policy="slo",
        profile_results_dir=Path(DEFAULT_PROFILE),
        ttft_ms=trial.slo.ttft_ms or 500.0,
        itl_ms=trial.slo.itl_ms or 50.0,
        max_gpu_budget=trial.cap,
    )


def planner_options(trial: Trial, policy: str, folder: Path) -> PlannerConfig:
    """That policy with its defaults: targets, cap and the profile of these engines (written to `folder`) are given."""
    if policy == "slo":
        return slo_of(trial)
    given: dict[str, object] = {"policy": policy, "max_gpu_budget": trial.cap}
    if policy != "load":
        given |= {"ttft_ms": trial.slo.ttft_ms, "itl_ms": trial.slo.itl_ms, "profile_results_dir": folder}
        write_profile(folder, trial.speed)
    if policy == "throughput-load":
        given["optimization_target"] = "sla"
    return planner_section("Planner", given)


def write_profile(folder: Path, speed: float) -> None:
    """The shipped profile of engines that are so many times as fast, as Dynamo's profiler writes it (JSON)."""
    profile = read_profile(DEFAULT_PROFILE)
    prefill = {
        "prefill_isl": profile.prefill.isl,
        "prefill_ttft": [ttft_ms / speed for ttft_ms in profile.prefill.ttft_ms],
        "prefill_thpt_per_gpu": [thpt * speed for thpt in profile.prefill.thpt_per_gpu],
    }
    decode = {
        "x_kv_usage": profile.decode.kv_usage,
        "y_context_length": profile.decode.context_length,
        "z_itl": [itl_ms / speed for itl_ms in profile.decode.itl_ms],
        "z_thpt_per_gpu": [thpt * speed for thpt in profile.decode.thpt_per_gpu],
        "max_kv_tokens": profile.decode.max_kv_tokens,
    }
    (folder / "prefill_raw_data.json").write_text(json.dumps(prefill), encoding="utf-8")
    (folder / "decode_raw_data.json").write_text(json.dumps(decode), encoding="utf-8")
