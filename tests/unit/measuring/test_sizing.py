"""`dynamo plan`: the smallest fleet that keeps targets, in the simulator with a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner

from dynamo_local.cli.plan import plan as command
from dynamo_local.config.planner_section import planner_section
from dynamo_local.errors import BadInput
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.options import FleetShape, Slo
from dynamo_local.simulator.sizing import Wanted, engines_of_profile, made, plan, section, sizes, with_handoff
from dynamo_local.simulator.trace import TraceRequest

SLO = Slo(ttft_ms=400.0, itl_ms=20.0)


def load(rate: float) -> Sequence[TraceRequest]:
    return [TraceRequest(n / rate, 3000, 20) for n in range(80)]


@pytest.fixture(scope="module")
def engines():
    """The H200's, which ships."""
    return engines_of_profile(DEFAULT_PROFILE, aggregated=False)


def found(engines, rate: float, **wanted):
    return plan(engines, Wanted(SLO, **wanted), lambda seed: load(rate), lambda text: None, jobs=1)


def test_a_small_load_needs_one_worker_of_each_role(engines):
    planned = found(engines, 2.0)
    assert planned.attained
    assert planned.best.shape == FleetShape(1, 1)
    assert planned.lowest <= planned.best.metrics.attainment <= planned.highest


@pytest.mark.parametrize(
    ("beyond", "seconds"),
    [
        ({"overhead_ms": 4.0, "per_token_ms": 0.01}, 0.014),
        ({"overhead_ms": 4.0, "per_token_ms": 0.0}, 0.004),
    ],
)
def test_hand_offs_take_what_was_measured_by_their_size(engines, beyond, seconds):
    """1,000 tokens; where nothing was measured they stay as they were."""
    assert with_handoff(engines.sim, beyond).transfer_s(1000) == pytest.approx(seconds)
    assert with_handoff(engines.sim, {}) == engines.sim


def test_aggregated_engines_are_heard_later_by_what_was_measured(engines):
    """A target that the engine keeps alone, and not with the way over HTTP. Gaps are what they were."""
    wanted = Wanted(Slo(ttft_ms=100.0), aggregated=True, gpus=1)
    metrics = []
    for beyond in ({}, {"overhead_ms": 50.0, "per_token_ms": 0.01}):
        planned = plan(replace(engines, beyond=beyond), wanted, lambda seed: load(1.0), lambda text: None, jobs=1)
        metrics.append(planned.best.metrics)
    alone, heard = metrics
    assert heard.ttft_ms.p50 == pytest.approx(alone.ttft_ms.p50 + 50.0 + 0.01 * 3000)
    assert heard.itl_ms == alone.itl_ms
    assert (alone.attainment, heard.attainment) == (1.0, 0.0)


@pytest.mark.full
def test_more_load_needs_more_prefill_workers_and_the_split_is_named(engines):
    planned = found(engines, 40.0)
    assert planned.attained
    assert planned.best.shape.prefill >= 3
    assert all(tried.gpus == planned.best.gpus for tried in planned.alternatives)
    assert all(tried.metrics.attainment <= planned.best.metrics.attainment for tried in planned.alternatives)


@pytest.mark.full
def test_what_no_fleet_keeps_is_said_with_the_best_one(engines):
    planned = found(engines, 40.0, gpus=2)
    assert not planned.attained
    assert planned.best.metrics.attainment < 0.95


def test_no_gpu_for_each_role_is_refused(engines):
    with pytest.raises(BadInput, match="no fleet fits on 1 GPUs"):
        found(engines, 2.0, gpus=1)


def test_sizes_go_from_the_smallest_to_the_largest_and_have_every_split(engines):
    by_size = dict(sizes(engines, 4, aggregated=False))
    assert [*by_size] == [2, 3, 4]
    assert set(by_size[4]) == {FleetShape(1, 3), FleetShape(2, 2), FleetShape(3, 1)}
    assert dict(sizes(engines, 2, aggregated=True)) == {1: [FleetShape(0, 1)], 2: [FleetShape(0, 2)]}


def test_what_is_written_is_a_planners_section(engines):
    written = yaml.safe_load(yaml.safe_dump(section(engines, found(engines, 2.0), Wanted(SLO), {})))
    assert written["VllmWorker"]["ServiceArgs"]["workers"] == 1
    config = planner_section("Planner", written["Planner"])
    assert (config.policy, config.ttft_ms, config.itl_ms) == ("slo", 400.0, 20.0)


def test_an_aggregated_fleet_has_a_planner_that_plans_such_graphs(engines):
    wanted = Wanted(SLO, aggregated=True)
    planned = plan(engines, wanted, lambda seed: load(2.0), lambda text: None, jobs=1)
    assert planned.best.shape == FleetShape(0, 1)
    written = section(engines, planned, wanted, {})
    assert "PrefillWorker" not in written
    config = planner_section("Planner", written["Planner"])
    assert (config.policy, config.optimization_target) == ("throughput-load", "sla")


def test_a_made_load_is_another_one_for_another_seed_and_has_its_rate():
    traces = made(5.0, 1000, 100, 0.5)
    assert traces(1) == traces(1) != traces(2)
    assert len(traces(0)) / traces(0)[-1].at_s == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "1", "--isl", "10", "--osl", "10"], "no target to keep"),
        (["--ttft", "100"], "the load is not known"),
        (["--ttft", "100", "--rate", "1"], "--isl is missing"),
        (["--ttft", "100", "--trace", "x", "--rate", "1"], "keep one"),
        (["--ttft", "100", "--profile", "nowhere", "--rate", "1", "--isl", "9", "--osl", "9"], "no engine profile"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(words, said):
    with pytest.raises(Exception, match=said) as refused:
        CliRunner().invoke(
            command,
            words if "--profile" in words else [*words, "--profile", DEFAULT_PROFILE],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert getattr(refused.value, "exit_code", None) == 2
