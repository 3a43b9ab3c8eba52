"""The options of each policy, with defaults for all that a test does not name."""

from __future__ import annotations

from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.profile.reading import DEFAULT_PROFILE


def load_options(**options: Any) -> PlannerConfig:
    return PlannerConfig(policy="load", **options)


def sla_options(**options: Any) -> PlannerConfig:
    return PlannerConfig(**{"policy": "sla", "profile_results_dir": DEFAULT_PROFILE, **options})


def slo_options(**options: Any) -> PlannerConfig:
    return PlannerConfig(**{"policy": "slo", "profile_results_dir": DEFAULT_PROFILE, **options})


def throughput_load_options(**options: Any) -> PlannerConfig:
    return PlannerConfig(policy="throughput-load", **options)
