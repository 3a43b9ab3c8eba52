"""The options of `policy: throughput-load`, checked as a whole and against the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.config.resolve import check_planner
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.pass_model import Kind
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.profile.reading import DEFAULT_PROFILE


def options(**values: Any) -> PlannerConfig:
    return planner_section("Planner", {"policy": "throughput-load", **values})


section = options


def test_the_grid_of_ticks_is_that_of_the_plugins() -> None:
    assert options(scheduling={"scale_interval_seconds": 2.5}).tick_s == 2.5


def test_names_of_dynamo_and_of_the_seed() -> None:
    seed = options(ttft=300, itl=20, adjustment_interval=60, optimization_target="sla", advisory=True)
    dynamo = options(
        ttft_ms=300, itl_ms=20, throughput_adjustment_interval_seconds=60, optimization_target="sla", no_operation=True
    )
    assert seed == dynamo
    assert (seed.ttft_ms, seed.throughput_adjustment_interval_seconds, seed.optimization_target) == (300, 60, "sla")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"optimization-target": "sla", "enable-throughput-scaling": False},
            "enable-throughput-scaling and enable_load_scaling are both off",
        ),
        (
            {"optimization-target": "sla", "enable-load-scaling": True, "load-adjustment-interval-seconds": 180},
            "must be below throughput_adjustment_interval_seconds",
        ),
        ({"scheduling": {"scale_interval_seconds": 7}}, "must divide load_adjustment_interval_seconds"),
        ({"fpm-sample-bucket-size": 15}, "perfect square"),
        ({"max-num-fpm-samples": 4}, "must not be below load_min_observations"),
        ({"optimization-target": "load"}, "prefill_scale_up_queue_tokens and prefill_scale_down_queue_tokens"),
        (
            {
                "optimization-target": "load",
                "mode": "agg",
                "decode-scale-up-kv-rate": 5,
                "decode-scale-down-kv-rate": 5,
            },
            "decode-scale-down-kv-rate .5. must be below",
        ),
        ({"mode": "agg", "decode-min-endpoint": 1}, "has no effect: the mode is agg"),
        ({"load-scaling-down-sensitivity": 101}, "load-scaling-down-sensitivity"),
        ({"min-gpu-budget": -2}, "min-gpu-budget"),
        ({"decode_kv_scale_up_threshold": 0.8}, "option of the policy load"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        section(**values)


def graph(*roles: Role, gpu: int = 1) -> GraphSpec:
    services = tuple(ServiceSpec(role.value.title(), role, resources=Resources(gpu)) for role in roles)
    return GraphSpec("dynamo", "graphs:Graph", services)


DISAGG, AGG = graph(Role.PREFILL, Role.DECODE), graph(Role.AGGREGATED)


@pytest.mark.parametrize(
    ("values", "served", "told"),
    [
        ({"mode": "agg"}, DISAGG, "mode is agg, but the graph has a prefill component"),
        ({"mode": "disagg"}, AGG, "mode is disagg, but the graph is aggregated"),
        ({"min-endpoint": 5}, DISAGG, "need 10 GPUs"),
        ({"prefill-min-endpoint": 8}, DISAGG, "need 9 GPUs"),
        ({"min-endpoint": 3}, graph(Role.PREFILL, Role.DECODE, gpu=2), "need 12 GPUs"),
    ],
)
def test_what_the_graph_cannot_be_or_afford_is_refused(values: dict[str, Any], served: GraphSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_planner(section(**values), served)


def test_the_backend_sglang_is_refused_where_our_own_workers_serve() -> None:
    own = GraphSpec("dynamo", "graphs:Graph", (ServiceSpec("VllmWorker", Role.AGGREGATED, resources=Resources(1)),))
    with pytest.raises(ConfigError, match="backend is sglang, but VllmWorker runs vLLM or the sim engine"):
        check_planner(section(backend="sglang"), own)
    command = GraphSpec("dynamo", "graph.yaml", (replace(own.services[0], runtime="http"),))
    check_planner(section(backend="sglang"), command)
    check_planner(section(backend="vllm"), own)


def sla(**values: object) -> PlannerConfig:
    return planner_section("Planner", {"policy": "sla", **values})


@pytest.mark.parametrize(
    ("values", "served", "told"),
    [
        ({"min_endpoint": 5}, DISAGG, "min_endpoint 5, .* need 10 GPUs: 5 × 1 of Prefill, 5 × 1 of Decode"),
        ({"min_gpu_budget": 8}, DISAGG, "min_gpu_budget 8 for each role. need 16 GPUs"),
        ({"min_gpu_budget": 5}, graph(Role.PREFILL, Role.DECODE, gpu=2), "need 12 GPUs: 3 × 2 of Prefill"),
    ],
)
def test_floors_of_sla_are_held_against_the_budget(values: dict[str, Any], served: GraphSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_planner(sla(**values), served)


def test_floors_of_sla_that_fit_are_taken() -> None:
    check_planner(sla(min_endpoint=4), DISAGG)
    check_planner(sla(min_gpu_budget=4), DISAGG)
    check_planner(sla(min_gpu_budget=-1), DISAGG)


def test_sla_does_not_go_to_zero_and_says_why() -> None:
    with pytest.raises(ConfigError, match="min_endpoint 0: the policy sla keeps one worker of each role"):
        sla(min_endpoint=0)
    assert section(min_endpoint=0).min_endpoint == 0


def test_what_fits_the_graph_is_taken() -> None:
    check_planner(section(), DISAGG)
    check_planner(section(mode="agg", min_endpoint=8), AGG)
    check_planner(section(mode="prefill", prefill_min_endpoint=8), DISAGG)


def test_models_begin_with_a_profile() -> None:
    """Each kind's, so that the first window can be sized."""
    policy = policy_of(options(optimization_target="sla", profile_results_dir=DEFAULT_PROFILE))
    assert isinstance(policy, ThroughputLoadPolicy)
    models = policy.first(0.0).models
    assert {kind: (model.ready, model.source) for kind, model in models.items()} == dict.fromkeys(
        Kind, (True, "profile")
    )
    assert models[Kind.PREFILL].pass_s(prefill_tokens=4000) == pytest.approx(0.1, rel=0.5)


def test_a_profile_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no engine profile"):
        policy_of(options(optimization_target="sla", profile_results_dir="/nowhere"))
