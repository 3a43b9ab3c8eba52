"""The `Planner` section of the policy `sla`: its names, and what makes it a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.errors import ConfigError
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.sla import SlaPolicy
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.planner.options import sla_options
from tests.fakes.profile_folders import write_npz

SECTION = {"policy": "sla", "profile-results-dir": DEFAULT_PROFILE}


def options(**more: Any) -> PlannerConfig:
    """Of that section."""
    return planner_section("Planner", SECTION | {k.replace("_", "-"): v for k, v in more.items()})


def test_the_defaults_are_dynamos() -> None:
    assert options() == sla_options(ttft_ms=500.0, itl_ms=50.0, throughput_adjustment_interval_seconds=180.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"ttft": 200, "itl": 10, "adjustment_interval": 60},
            sla_options(ttft_ms=200.0, itl_ms=10.0, throughput_adjustment_interval_seconds=60.0),
        ),
        (
            {"ttft_ms": 200, "itl_ms": 10, "throughput_adjustment_interval": 60},
            sla_options(ttft_ms=200.0, itl_ms=10.0, throughput_adjustment_interval_seconds=60.0),
        ),
        (
            {"load_predictor": "kalman", "kalman_min_points": 3},
            sla_options(load_predictor="kalman", kalman_min_points=3),
        ),
        (
            {"max_throughput_scaling_replicas": 2, "max_gpu_budget": 4, "min_endpoint": 2, "no_correction": True},
            sla_options(min_endpoint=2, max_gpu_budget=4, max_throughput_scaling_replicas=2, no_correction=True),
        ),
    ],
)
def test_both_generations_of_names_are_taken(given: dict[str, Any], expected: PlannerConfig) -> None:
    assert options(**given) == expected


def test_without_a_profile_it_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=f"say profile-results-dir, .*{DEFAULT_PROFILE}"):
        policy_of(planner_section("Planner", {"policy": "sla"}))


def test_a_profile_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine profile"):
        policy_of(options(profile_results_dir=str(tmp_path)))


def test_a_profile_and_a_trace_make_the_policy(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = (f'{{"timestamp": {1000 * second}, "input_length": 1000, "output_length": 10}}' for second in range(100))
    trace.write_text("\n".join(rows))
    made = policy_of(
        options(
            profile_results_dir=write_npz(tmp_path / "profile"),
            load_predictor_warmup_trace=str(trace),
            adjustment_interval=20,
        )
    )
    assert isinstance(made, SlaPolicy)
    assert made.first(0.0).series.columns[0] == (20.0,) * 4
