"""The policy `slo` in the simulator, with a fleet that is far too small. The policy recovers."""

from __future__ import annotations

from functools import partial

import pytest

from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.slo import forecast as lengths
from dynamo_local.simulator.metrics import within
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, Run, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner.options import slo_options

SLO = Slo(400, 12)
BUDGET = 6


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demand of fewer requests: what is tested here does not need the sharpness of many."""
    monkeypatch.setattr(lengths, "REQUESTS", 150)


def came(*stretches: tuple[float, float]) -> list[TraceRequest]:
    """Requests of 3,000 and 100 tokens, evenly: `(until, requests per second)`."""
    found, at_s = [], 0.0
    for until_s, rate in stretches:
        while at_s < until_s:
            found.append(TraceRequest(at_s, 3000, 100))
            at_s += 1 / rate
    return found


def planned(requests: list[TraceRequest], start_up_s: float, *, conditional: bool) -> Run:
    options = SimulationOptions(
        shape=FleetShape(1, 1), gpus=8, start_up_s=start_up_s, conditional=conditional, max_num_waiting=10_000
    )
    policy = slo_options(ttft_ms=400, itl_ms=12, max_gpu_budget=BUDGET)
    made = partial(policy_of, start_up_s=start_up_s)
    return run_case(requests, Case("slo", options, planner=policy, make_policy=made))


def kept(run: Run, from_s: float, until_s: float) -> float:
    """Share of the requests of that time that were within both targets."""
    jobs = [job for job in run.jobs if from_s <= job.request.at_s < until_s]
    return sum(job.last_s is not None and within(job, SLO) for job in jobs) / len(jobs)


@pytest.mark.parametrize("conditional", [False, True])
def test_a_fleet_that_is_too_small_from_the_first_request_on_recovers(conditional: bool) -> None:
    run = planned(came((150.0, 40.0)), 15.0, conditional=conditional)
    assert kept(run, 100.0, 150.0) > 0.95
    assert max(sum(acted.decision.targets.values()) for acted in run.acted) <= BUDGET


def test_a_step_of_five_times_the_load_is_cleared() -> None:
    run = planned(came((60.0, 7.0), (150.0, 35.0)), 15.0, conditional=False)
    assert kept(run, 0.0, 60.0) > 0.95
    assert kept(run, 110.0, 150.0) > 0.95
