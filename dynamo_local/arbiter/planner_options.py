"""Turns the `Planner` section into the values that its policy takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_local.arbiter.profile_check import check_profile
from dynamo_local.config.planner import POLICIES, PlannerConfig, options_of
from dynamo_local.config.planner_section import chosen_policy, own_names, planner_section
from dynamo_local.config.resolve import check_planner, planned_components
from dynamo_local.core.types import EVERY, WAKES, Actuator, GraphSpec
from dynamo_local.errors import BadInput
from dynamo_local.planner.prometheus import PrometheusOptions


def changed_options(before: PlannerConfig, given: Mapping[str, Any], graph: GraphSpec) -> PlannerConfig:
    """These options over the previous ones, checked as a whole. Raises `ConfigError` that names the option.

    Another policy begins with the defaults of its own options. Targets choose a policy if none is named, as in a
    section.
    """
    found = {key.replace("-", "_"): value for key, value in given.items()}
    named = "policy" in before.model_fields_set
    policy = str(found.get("policy", before.policy)) if named else chosen_policy(found, before.policy)
    found = own_names("Planner", found, policy)
    if "enabled" in found:
        raise BadInput("enabled belongs to the configuration's Planner section; say start or stop")
    now = before.model_dump(exclude_unset=True, exclude={"enabled"})
    if policy != before.policy and policy in POLICIES:
        found["policy"] = policy
        now = {name: value for name, value in now.items() if name in options_of(policy)}
    config = planner_section("Planner", {**now, **found})
    planned_components(graph)
    check_planner(config, graph)
    check_profile(config, graph)
    return config


def actuators(config: PlannerConfig) -> frozenset[Actuator]:
    """The actuators for its decisions. Starts are always possible, flips only if an option allows them."""
    return WAKES if config.actuators is None else frozenset(each for each in EVERY if each in config.actuators)


def prometheus_options(config: PlannerConfig, namespace: str) -> PrometheusOptions | None:
    """The Prometheus server to ask for traffic. None if the graph's own frontends are asked. Raises `ConfigError`."""
    if config.metric_pulling_prometheus_endpoint is None:
        return None
    return PrometheusOptions(
        endpoint=config.metric_pulling_prometheus_endpoint,
        metrics=config.throughput_metrics_source,
        namespace=namespace,
        model=config.served_model_name,
        token_file=config.metric_pulling_prometheus_token_file,
        ca_bundle=config.metric_pulling_prometheus_ca_bundle,
        ssl_verify=config.metric_pulling_prometheus_ssl_verify,
        extra_query_params=config.metric_pulling_prometheus_extra_query_params,
        request_timeout_s=config.metric_pulling_prometheus_request_timeout_seconds,
    )
