"""The simulator against real processes: the same trace and configuration, the engine in real time.

The simulator leaves out HTTP, hops and queues, some milliseconds for each request. At a tenth of the engine's speed
these are small, and the host stays idle enough to keep time. On a busy host the test is skipped, with what it measured.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.simulator.metrics import measure
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, Run, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.drivers.beside_twin import Watched, all_answered, counter, play, unless_busy
from tests.drivers.served import Served
from tests.fakes.planner.options import load_options, sla_options, throughput_load_options
from tests.fakes.profile_folders import slow_engine

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(300)]

SPEED = 0.1
SIM = SimOptions(speed=SPEED, num_gpu_blocks=400)
WORDS = (f"--Common.sim.speed={SPEED}", "--Common.sim.num-gpu-blocks=400")
AGREE = 0.10


def poisson(rates: Sequence[tuple[float, float]], *, isl: int, osl: int, seed: int) -> list[TraceRequest]:
    """Arrivals by chance at `(seconds, rate)` after each other, the first at 0 s."""
    rng = random.Random(seed)
    found, begin_s = [TraceRequest(0.0, isl, osl)], 0.0
    for seconds, rate in rates:
        at_s = begin_s
        while (at_s := at_s + rng.expovariate(rate)) < begin_s + seconds:
            found.append(TraceRequest(at_s, isl, osl))
        begin_s += seconds
    return found


def agree(watched: Watched, run: Run) -> None:
    """All were answered; mean TTFT and ITL within 10 %."""
    all_answered(watched)
    found = measure(run, Slo())
    assert found.completed == len(watched.ttft_s)
    ttft_ms, itl_ms = statistics.fmean(watched.ttft_s) * 1000, statistics.fmean(watched.itl_s) * 1000
    told = (
        f"TTFT {ttft_ms:.1f} ms, twin {found.ttft_ms.mean:.1f} ms; ITL {itl_ms:.2f} ms, twin {found.itl_ms.mean:.2f} ms"
    )
    print(f"{told}; host {watched.busy_percent:.0f} % busy")
    assert ttft_ms == pytest.approx(found.ttft_ms.mean, rel=AGREE), told
    assert itl_ms == pytest.approx(found.itl_ms.mean, rel=AGREE), told


def within_one_worker(watched: Watched, run: Run) -> None:
    """At every moment the two fleets differ by one worker of a role at most, give or take a start-up."""
    ready = counter(run)
    for at_s, counts in watched.counts:
        for role, count in counts.items():
            near = {ready(role, at) for at in (at_s - START_UP_S, at_s, at_s + START_UP_S)}
            assert min(near) - 1 <= count <= max(near) + 1, f"{role} at {at_s:.1f} s: {count}, simulated {sorted(near)}"


@pytest.mark.parametrize(("prefill", "decode", "rate"), [(1, 1, 1.0), (2, 2, 2.0)])
async def test_a_fixed_fleet_is_as_fast_as_its_twin(prefill: int, decode: int, rate: float) -> None:
    trace = poisson([(20.0, rate)], isl=1500, osl=40, seed=3)
    workers = (f"--PrefillWorker.ServiceArgs.workers={prefill}", f"--VllmWorker.ServiceArgs.workers={decode}")
    with Served(*WORDS, *workers) as served:
        watched = await play(served.start(), trace)
    run = run_case(trace, Case("", SimulationOptions(shape=FleetShape(prefill, decode), sim=SIM)))
    with unless_busy(watched):
        agree(watched, run)


START_UP_S = 3.0
PLANNED_SIM = replace(SIM, num_gpu_blocks=230)
PLANNER = load_options(
    adjustment_interval=3.0,
    metric_pulling_interval=0.5,
    max_gpu_budget=5,
    decode_kv_scale_up_threshold=0.4,
    decode_kv_scale_down_threshold=0.15,
)
PLANNER_WORDS = (
    "--Common.sim.num-gpu-blocks=230",
    "--Planner.adjustment-interval=3",
    "--Planner.metric-pulling-interval=0.5",
    "--Planner.max-gpu-budget=5",
    "--Planner.decode-kv-scale-up-threshold=0.4",
    "--Planner.decode-kv-scale-down-threshold=0.15",
)


async def test_the_planned_fleet_is_the_twins_within_one_worker() -> None:
    trace = evenly([(9.0, 0.25), (30.0, 2.6), (27.0, 0.25)], isl=500, osl=160)
    start_up = f"--Common.sim.start-up-s={(START_UP_S - 1.0) * SPEED}"  # a process takes about a second besides
    with Served(*WORDS, start_up, *PLANNER_WORDS, "--planner") as served:
        watched = await play(served.start(), trace, planned=True)
    run = run_case(trace, Case("", SimulationOptions(sim=PLANNED_SIM, start_up_s=START_UP_S), PLANNER))
    with unless_busy(watched):
        assert max(counts["decode"] for _, counts in watched.counts) == 3
        assert watched.counts[-1][1] == {"prefill": 1, "decode": 1}
        within_one_worker(watched, run)
        agree(watched, run)


def by_targets(policy: str, profile: str) -> tuple[PlannerConfig, tuple[str, ...]]:
    """The policy's options, and what of them are words of its own."""
    if policy == "sla":
        return sla_options(
            profile_results_dir=profile,
            ttft_ms=1500.0,
            itl_ms=60.0,
            throughput_adjustment_interval_seconds=6.0,
            metric_pulling_interval=0.5,
            max_gpu_budget=5,
            no_correction=True,
        ), ("--Planner.no-correction=true",)
    return throughput_load_options(
        optimization_target="sla",
        profile_results_dir=profile,
        ttft_ms=1500.0,
        itl_ms=60.0,
        throughput_adjustment_interval_seconds=6.0,
        metric_pulling_interval=0.5,
        max_gpu_budget=5,
    ), ("--Planner.optimization-target=sla",)


@pytest.mark.parametrize("policy", ["sla", "throughput-load"])
async def test_a_fleet_planned_by_targets_is_the_twins_within_one_worker(policy: str, tmp_path: Path) -> None:
    profile = slow_engine(tmp_path / "profile")
    sim = SimOptions(profile=profile, start_up_s=START_UP_S - 1.0)
    planner, own = by_targets(policy, profile)
    words = (
        f"--Common.sim.profile={profile}",
        f"--Common.sim.start-up-s={START_UP_S - 1.0}",
        f"--Planner.policy={policy}",
        *own,
        f"--Planner.profile-results-dir={profile}",
        "--Planner.ttft=1500",
        "--Planner.itl=60",
        "--Planner.adjustment-interval=6",
        "--Planner.metric-pulling-interval=0.5",
        "--Planner.max-gpu-budget=5",
    )
    trace = evenly([(9.0, 0.5), (30.0, 3.0), (24.0, 0.5)], isl=200, osl=150)
    with Served(*words, "--planner") as served:
        watched = await play(served.start(), trace, planned=True)
    run = run_case(trace, Case("", SimulationOptions(sim=sim, start_up_s=START_UP_S), planner))
    with unless_busy(watched):
        all_answered(watched)
        assert max(counts["decode"] for _, counts in watched.counts) == 3
        within_one_worker(watched, run)


def evenly(rates: Sequence[tuple[float, float]], *, isl: int, osl: int) -> list[TraceRequest]:
    """Arrivals at equal distances, `(seconds, rate)` after each other, the first at 0 s."""
    found, begin_s = [], 0.0
    for seconds, rate in rates:
        found += [TraceRequest(begin_s + n / rate, isl, osl) for n in range(int(seconds * rate))]
        begin_s += seconds
    return found
