"""Turns the `Planner` section into the values that its policy takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.profile_check import check_profile
from dynamo_local.config.planner import POLICIES, PlannerConfig, chosen_policy, options_of, own_names, planner_section
from dynamo_local.config.resolve import check_planner, planned_components
from dynamo_local.core.types import EVERY, WAKES, Actuator, GraphSpec
from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.planner.pass_model import Features
from dynamo_local.planner.policies.options import LoadOptions, PolicyOptions
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.policies.sla_sizing import SlaOptions
from dynamo_local.planner.policies.slo.ladder import SloOptions
from dynamo_local.planner.policies.throughput_load.options import DownRule, Mode, Target, ThroughputLoadOptions
from dynamo_local.planner.predictors import PredictorOptions
from dynamo_local.planner.prometheus import PrometheusOptions
from dynamo_local.planner.values import Series
from dynamo_local.profile.reading import DEFAULT_PROFILE, shipped_profiles


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


def policy_options(config: PlannerConfig) -> PolicyOptions:
    """The options of the policy. Names, folders and `no_operation` are not among them."""
    match config.policy:
        case "load":
            return load_options(config)
        case "throughput-load":
            return throughput_load_options(config)
        case "sla":
            return sla_options(config)
        case "slo":
            return slo_options(config)


def actuators(config: PlannerConfig) -> frozenset[Actuator]:
    """The actuators for its decisions. Starts are always possible, flips only if an option allows them."""
    return WAKES if config.actuators is None else frozenset(each for each in EVERY if each in config.actuators)


def policy_of(config: PlannerConfig) -> Policy[Any]:
    """A new policy with these options. Raises `ConfigError` for unusable ones.

    The first call imports all policies, and some read files. So call it in a thread.
    """
    from dynamo_local.planner import choosing

    return choosing.policy_of(policy_options(config))


def load_options(config: PlannerConfig) -> LoadOptions:
    return LoadOptions(
        adjustment_interval_s=config.adjustment_interval,
        metric_pulling_interval_s=config.metric_pulling_interval,
        max_gpu_budget=config.max_gpu_budget,
        min_gpu_budget=config.min_gpu_budget,
        decode_kv_scale_up_threshold=config.decode_kv_scale_up_threshold,
        decode_kv_scale_down_threshold=config.decode_kv_scale_down_threshold,
        prefill_queue_scale_up_threshold=config.prefill_queue_scale_up_threshold,
        prefill_queue_scale_down_threshold=config.prefill_queue_scale_down_threshold,
        decode_kv_per_waiting_request=config.decode_kv_per_waiting_request,
    )


def throughput_load_options(config: PlannerConfig) -> ThroughputLoadOptions:
    """`min_gpu_budget` is off unless it is given, as in Dynamo."""
    predictor = predictor_options(config)
    return ThroughputLoadOptions(
        mode=None if config.mode is None else Mode(config.mode),
        optimization_target=Target(config.optimization_target),
        enable_throughput_scaling=config.enable_throughput_scaling,
        enable_load_scaling=config.enable_load_scaling,
        throughput_adjustment_interval_s=config.throughput_adjustment_interval_seconds,
        load_adjustment_interval_s=config.load_adjustment_interval_seconds,
        scale_interval_s=config.scheduling.scale_interval_seconds,
        ttft_ms=config.ttft_ms,
        itl_ms=config.itl_ms,
        down_rule=DownRule(config.scale_down_rule),
        regression_features=Features(config.regression_features),
        load_scaling_down_sensitivity=config.load_scaling_down_sensitivity,
        load_min_observations=config.load_min_observations,
        max_num_fpm_samples=config.max_num_fpm_samples,
        fpm_sample_bucket_size=config.fpm_sample_bucket_size,
        prefill_scale_up_queue_tokens=config.prefill_scale_up_queue_tokens,
        prefill_scale_down_queue_tokens=config.prefill_scale_down_queue_tokens,
        decode_scale_up_kv_rate=config.decode_scale_up_kv_rate,
        decode_scale_down_kv_rate=config.decode_scale_down_kv_rate,
        max_throughput_scaling_replicas=config.max_throughput_scaling_replicas,
        max_gpu_budget=config.max_gpu_budget,
        min_gpu_budget=config.min_gpu_budget if "min_gpu_budget" in config.model_fields_set else -1,
        min_endpoint=config.min_endpoint,
        prefill_min_endpoint=config.prefill_min_endpoint,
        decode_min_endpoint=config.decode_min_endpoint,
        speculative_nextn=config.speculative_nextn,
        load_predictor=config.load_predictor,
        predictor_options=predictor.task(Series(config.throughput_adjustment_interval_seconds)).options,
        windows_max=predictor.windows_max,
        warmup_trace=_text(config.load_predictor_warmup_trace),
        adaptive_intervals=config.adaptive_intervals,
        profile=_text(config.profile_results_dir),
        metric_pulling_interval_s=config.metric_pulling_interval,
    )


def sla_options(config: PlannerConfig) -> SlaOptions:
    """Raises `ConfigError` without a profile."""
    if config.profile_results_dir is None:
        raise ConfigError(
            "Planner: the policy sla sizes by a profile of the engines: say profile-results-dir, a folder as Dynamo's "
            f"profiler writes it, or one of: {', '.join(shipped_profiles())}"
        )
    return SlaOptions(
        profile=str(config.profile_results_dir),
        ttft_ms=config.ttft_ms,
        itl_ms=config.itl_ms,
        adjustment_interval_s=config.throughput_adjustment_interval_seconds,
        metric_pulling_interval_s=config.metric_pulling_interval,
        predictor=predictor_options(config),
        warmup_trace=_text(config.load_predictor_warmup_trace),
        min_endpoint=config.min_endpoint,
        min_gpu_budget=config.min_gpu_budget,
        max_gpu_budget=config.max_gpu_budget,
        max_step=config.max_throughput_scaling_replicas,
        adaptive_intervals=config.adaptive_intervals,
        no_correction=config.no_correction,
    )


def slo_options(config: PlannerConfig) -> SloOptions:
    """Without a profile it begins with the shipped one, and learns."""
    return SloOptions(
        profile=_text(config.profile_results_dir) or DEFAULT_PROFILE,
        ttft_ms=config.ttft_ms,
        itl_ms=config.itl_ms,
        target=config.target,
        thrift=config.thrift,
        metric_pulling_interval_s=config.metric_pulling_interval,
        min_endpoint=config.min_endpoint,
        min_gpu_budget=config.min_gpu_budget,
        max_gpu_budget=config.max_gpu_budget,
    )


def predictor_options(config: PlannerConfig) -> PredictorOptions:
    """The predictor. Raises `ConfigError` if its extra is not installed."""
    return PredictorOptions(**{field.name: getattr(config, field.name) for field in fields(PredictorOptions)})


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


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
