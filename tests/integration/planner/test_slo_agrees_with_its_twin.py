"""Ten minutes of recorded conversations at real speed: `slo` plans real processes as it plans the simulator.

`$DYN_TWIN_MINUTES` is how long (10), `$DYN_TRACES` where the recorded hour lies; without it, requests are made.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from benchmarks.traces import conversation
from dynamo_local.engines.sim.facts import shape_of
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.slo.scaling_options import INTERVAL_S
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.metrics import gpu_seconds, measure
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.drivers.beside_twin import Watched, all_answered, by_blocks, play, unless_busy
from tests.drivers.planned import decided, planner
from tests.drivers.served import Served
from tests.fakes.planner.options import slo_options

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(1500)]

MINUTES = float(os.environ.get("DYN_TWIN_MINUTES", "10"))
TTFT_MS, ITL_MS = 2000.0, 50.0
START, BUDGET = FleetShape(2, 1), 8
START_UP_S = 20.0
PROCESS_S = 1.5
"""Seconds until a process runs, without the engine's own start-up."""
LOOK_EVERY_S = 1.0
DRAWS, LATE_MAX_S = 12, 0.1
"""Simulations, and by how much their requests are late at most: the share of HTTP and hops in a burst."""
SHARE_APART, GPUS_APART = 0.02, 0.1
"""Distance from the range of the simulations, which leave some things out and look once a second."""
WORDS = (
    "--VllmWorker.conditional-disagg=false",
    f"--PrefillWorker.ServiceArgs.workers={START.prefill}",
    f"--VllmWorker.ServiceArgs.workers={START.decode}",
    f"--Common.sim.start-up-s={START_UP_S - PROCESS_S}",
    f"--Planner.ttft={TTFT_MS:g}",
    f"--Planner.itl={ITL_MS:g}",
    f"--Planner.max-gpu-budget={BUDGET}",
)


def recorded() -> list[TraceRequest]:
    longest = shape_of(SimOptions(), ProfileModel.load(DEFAULT_PROFILE))[1]
    requests = conversation()
    print(requests.told)
    rows = [each for each in requests.rows if each.at_s < MINUTES * 60]
    return [each for each in rows if each.input_length + each.output_length <= longest]


def kept(watched: Watched) -> float:
    """Share of the requests within both targets, by their clients' clocks."""
    good = sum(ttft_s * 1000 <= TTFT_MS and itl_s * 1000 <= ITL_MS for ttft_s, itl_s in watched.latencies_s)
    return good / len(watched.latencies_s)


def held_s(watched: Watched) -> float:
    """GPU-seconds until the last answer."""
    looks = [*watched.held, (watched.end_s, 0)]
    return sum(gpus * max(0.0, until_s - at_s) for (at_s, gpus), (until_s, _) in pairwise(looks))


def twins(trace: Sequence[TraceRequest]) -> list[tuple[float, float]]:
    """Attainment and GPU-seconds of each simulation, in which each request comes a little later, by chance.

    The first decision falls up to five seconds after the first request (the planner of the real graph runs already),
    by a handful of answers: which ones these are hangs on milliseconds, and a fleet that was ordered stays for a while.
    So one twin is one draw, as the real graph is.
    """
    # The arbiter has seen its first workers start; those of the twin are there from the beginning.
    planned = slo_options(ttft_ms=TTFT_MS, itl_ms=ITL_MS, max_gpu_budget=BUDGET)
    twin = SimulationOptions(shape=START, gpus=BUDGET, start_up_s=START_UP_S, conditional=False)
    found = []
    for seed in range(DRAWS):
        chance = random.Random(seed)
        quiet_s = chance.uniform(0.0, INTERVAL_S)
        late = [replace(each, at_s=quiet_s + each.at_s + chance.uniform(0.0, LATE_MAX_S)) for each in trace]
        run = run_case(
            sorted(late, key=lambda each: each.at_s),
            Case("", twin, planned, make_policy=partial(policy_of, start_up_s=START_UP_S)),
        )
        measured = measure(run, Slo(TTFT_MS, ITL_MS))
        assert measured.completed == len(trace)
        held_before_s = (START.prefill + START.decode) * quiet_s
        found.append((measured.attainment, gpu_seconds(run.points, run.end_s) - held_before_s))
    return found


def beyond(value: float, draws: Sequence[float]) -> float:
    return max(0.0, min(draws) - value, value - max(draws))


async def test_slo_keeps_as_many_targets_with_as_many_gpus_as_in_the_twin() -> None:
    trace = recorded()
    with Served(*WORDS, "--planner") as served:
        watched = await play(served.start(), trace, planned=True, prompt_of=by_blocks, look_every_s=LOOK_EVERY_S)
        status, decisions = planner(served, "status"), decided(served)
    expected, expected_s = zip(*twins(trace), strict=True)
    told = (
        f"{len(trace)} requests: {kept(watched):.2%} within both targets, twins {min(expected):.2%} to "
        f"{max(expected):.2%}; {held_s(watched) / 3600:.3f} GPU-hours, twins {min(expected_s) / 3600:.3f} to "
        f"{max(expected_s) / 3600:.3f}; host {watched.busy_percent:.0f} % busy, requests at most "
        f"{watched.late_s * 1000:.0f} ms late"
    )
    print(told)
    assert status["options"]["policy"] == "slo"  # nobody has named it: the targets did
    assert status["failed_ticks"] == 0
    assert {record["inputs"]["policy"] for record in decisions} == {"slo"}
    with unless_busy(watched):
        all_answered(watched)
        assert len(watched.latencies_s) == len(trace), told
        assert beyond(kept(watched), expected) <= SHARE_APART, told
        assert beyond(held_s(watched), expected_s) <= GPUS_APART * statistics.fmean(expected_s), told
