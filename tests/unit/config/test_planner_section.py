"""The `Planner` section: one policy, its own options, under any of their names."""

from __future__ import annotations

import pytest

from dynamo_local.config.planner import POLICIES, PlannerConfig, known_names, options_of
from dynamo_local.config.planner_section import parse_settings, planner_section
from dynamo_local.errors import BadInput, ConfigError


def test_load_is_what_plans_unless_something_else_is_named() -> None:
    assert planner_section("Planner", {}).policy == "load"
    assert planner_section("Planner", {"policy": "sla"}).named["ttft_ms"] == 500


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"policy": "load", "ttft_ms": 300},
            "ttft_ms is an option of the policy sla and slo and throughput-load, and .* is load",
        ),
        ({"policy": "sla", "prefill-queue-scale-up-threshold": 1}, "prefill-queue-scale-up-threshold.*load"),
        ({"policy": "throughput"}, "'load', 'sla', 'slo' or 'throughput-load'"),
        ({"policy": "sla", "ttft": 300, "ttft_ms": 300}, "'ttft_ms' and another spelling"),
        ({"policy": "sla", "ttft-ms": 0}, "ttft-ms: must be greater than 0"),
        ({"policy": "sla", "metric_pulling_interval": 200}, "must not exceed throughput_adjustment_interval_seconds"),
        ({"policy": ["sla"]}, "policy"),
        ({"polici": "sla"}, "policy"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planner_section("Planner", values)


def test_the_names_of_the_seeds_and_of_dynamo_are_the_same_options() -> None:
    by_seed = planner_section("", {"policy": "sla", "ttft": 300, "itl": 20, "adjustment-interval": 60})
    by_dynamo = {"policy": "sla", "ttft_ms": 300, "itl_ms": 20, "throughput_adjustment_interval": 60}
    assert by_seed == planner_section("", by_dynamo)
    assert by_seed.throughput_adjustment_interval_seconds == 60
    assert planner_section("", {"adjustment_interval": 60}).adjustment_interval == 60


def test_every_option_belongs_to_a_policy_and_to_each_of_its_names() -> None:
    fields = set(known_names().values())
    assert fields == {name for policy in POLICIES for name in options_of(policy)}
    for policy in POLICIES:
        assert len(set(options_of(policy))) == len(options_of(policy))


def test_settings_of_the_command_line_are_read_by_any_name() -> None:
    found = parse_settings(["policy=throughput-load", "ttft=300", "load-predictor=kalman", "profile-results-dir=none"])
    assert found == {"policy": "throughput-load", "ttft": 300, "load_predictor": "kalman", "profile_results_dir": None}
    with pytest.raises(BadInput, match="ttft-ms"):
        parse_settings(["ttft-m=3"])


@pytest.mark.parametrize("target", [{"ttft": 2000}, {"ttft-ms": 2000}, {"itl_ms": 50}, {"itl": 50, "budget": 4}])
def test_slo_plans_where_targets_are_given_and_no_policy(target: dict[str, object]) -> None:
    """Who gives targets wants them kept; who has none goes on with `load`, and a policy that is named counts."""
    found = planner_section("Planner", target)
    assert found == planner_section("Planner", {**target, "policy": "slo"})
    assert found.policy == "slo"
    kept = found.model_dump(exclude_unset=True)
    assert planner_section("Planner", kept) == found
    assert kept["policy"] == "slo"  # what is written into a statefile says it, whatever is changed later
    with pytest.raises(ConfigError, match=r"and the policy is load|is a target, and the policy 'load' has none"):
        planner_section("Planner", {**target, "policy": "load"})
    with pytest.raises(ConfigError, match=r"adjustment_interval is an option of the policy load.* is slo .* where"):
        planner_section("Planner", {**target, "adjustment_interval": 20})


def test_without_targets_load_plans() -> None:
    assert planner_section("Planner", {"max_gpu_budget": 4, "adjustment_interval": 20}).policy == "load"
    with pytest.raises(ConfigError, match="and the policy is load"):
        planner_section("Planner", {"profile_results_dir": "x"})


def test_options_of_slo() -> None:
    found = planner_section("Planner", {"policy": "slo", "ttft": 2000, "itl": 50, "budget": 4, "target": 0.999})
    assert (found.ttft_ms, found.itl_ms, found.max_gpu_budget, found.target) == (2000, 50, 4, 0.999)
    with pytest.raises(ConfigError, match="min-endpoint 0: the policy slo keeps one worker of each role"):
        planner_section("Planner", {"policy": "slo", "min-endpoint": 0})


def test_the_name_of_the_last_release_for_the_cost_factor_is_read() -> None:
    """A section has it as an alias; a statefile is read as it was written."""
    assert planner_section("Planner", {"ttft": 200, "thrift": 2.0}).cost_factor == 2.0
    assert PlannerConfig.model_validate({"policy": "slo", "thrift": 2.0}).cost_factor == 2.0
