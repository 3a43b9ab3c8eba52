"""The `Planner` section of the policy `sla`: its names, and what makes it a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.planner_options import policy_options
from dynamo_local.config.planner import planner_section
from dynamo_local.errors import ConfigError
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.sla import SlaPolicy
from dynamo_local.planner.policies.sla_sizing import SlaOptions
from dynamo_local.planner.predictors import PredictorOptions
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.profile_folders import write_npz

SECTION = {"policy": "sla", "profile-results-dir": DEFAULT_PROFILE}


def options(**more: Any) -> SlaOptions:
    """Of that section."""
    found = policy_options(planner_section("Planner", SECTION | {k.replace("_", "-"): v for k, v in more.items()}))
    assert isinstance(found, SlaOptions)
    return found


def test_the_defaults_are_dynamos() -> None:
    assert options() == SlaOptions(DEFAULT_PROFILE, 500.0, 50.0, 180.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ttft": 200, "itl": 10, "adjustment_interval": 60}, SlaOptions(DEFAULT_PROFILE, 200.0, 10.0, 60.0)),
        (
            {"ttft_ms": 200, "itl_ms": 10, "throughput_adjustment_interval": 60},
            SlaOptions(DEFAULT_PROFILE, 200.0, 10.0, 60.0),
        ),
        (
            {"load_predictor": "kalman", "kalman_min_points": 3},
            SlaOptions(DEFAULT_PROFILE, predictor=PredictorOptions("kalman", kalman_min_points=3)),
        ),
        (
            {"max_throughput_scaling_replicas": 2, "max_gpu_budget": 4, "min_endpoint": 2, "no_correction": True},
            SlaOptions(DEFAULT_PROFILE, min_endpoint=2, max_gpu_budget=4, max_step=2, no_correction=True),
        ),
    ],
)
def test_both_generations_of_names_are_taken(given: dict[str, Any], expected: SlaOptions) -> None:
    assert options(**given) == expected


def test_without_a_profile_it_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=f"say profile-results-dir, .*{DEFAULT_PROFILE}"):
        policy_options(planner_section("Planner", {"policy": "sla"}))


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
