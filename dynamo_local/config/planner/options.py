"""The options of all policies as one section, of which each policy takes its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, model_validator

from dynamo_local.config.planner import latencies, shared, sla, slo, targets, throughput_load
from dynamo_local.config.planner.latencies import LatencyFields
from dynamo_local.config.planner.load import LoadFields
from dynamo_local.config.planner.measuring import MeasuringFields
from dynamo_local.config.planner.plugins import check_plugins
from dynamo_local.config.planner.shared import SharedFields
from dynamo_local.config.planner.sla import SlaFields
from dynamo_local.config.planner.slo import SloFields
from dynamo_local.config.planner.targets import TargetFields
from dynamo_local.config.planner.throughput_load import ThroughputLoadFields
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.service_config import underscored
from dynamo_local.sdk.settings import validate_section

POLICIES: Mapping[str, tuple[type[BaseModel], ...]] = {
    "load": (SharedFields, LoadFields),
    "sla": (SharedFields, LatencyFields, TargetFields, MeasuringFields, SlaFields),
    "slo": (SharedFields, LatencyFields, MeasuringFields, SloFields),
    "throughput-load": (SharedFields, LatencyFields, TargetFields, MeasuringFields, ThroughputLoadFields),
}
"""Whose options a policy takes."""

_ALIASES: Mapping[type[BaseModel], Mapping[str, str]] = {
    SharedFields: shared.ALIASES,
    LatencyFields: latencies.ALIASES,
    SloFields: slo.ALIASES,
    TargetFields: targets.ALIASES,
    SlaFields: sla.ALIASES,
    ThroughputLoadFields: throughput_load.ALIASES,
}


BY_TARGETS = "slo"
"""Who plans where targets are given, and no policy."""
_LATENCIES = frozenset({"ttft_ms", "itl_ms", *latencies.ALIASES})


def options_of(policy: str) -> tuple[str, ...]:
    """The names of the options that a policy takes."""
    return tuple(name for group in POLICIES[policy] for name in group.model_fields)


def aliases_of(policy: str) -> dict[str, str]:
    """Other names of a policy's options."""
    return {alias: name for group in POLICIES[policy] for alias, name in _ALIASES.get(group, {}).items()}


# The first base has the last fields.
class PlannerConfig(
    ThroughputLoadFields, SloFields, SlaFields, MeasuringFields, TargetFields, LatencyFields, LoadFields, SharedFields
):
    """The section `Planner`. An option of another policy than the chosen one is refused."""

    @property
    def named(self) -> dict[str, Any]:
        """The options of the chosen policy, by name."""
        return {name: getattr(self, name) for name in options_of(self.policy)}

    @model_validator(mode="after")
    def _of_its_policy(self) -> Self:
        known = options_of(self.policy)
        for name in type(self).model_fields:
            if name in self.model_fields_set and name not in known:
                owners = " and ".join(policy for policy in POLICIES if name in options_of(policy))
                raise ValueError(
                    f"{name} is an option of the policy {owners}, and the policy is {self.policy} (without `policy` it "
                    f"is {BY_TARGETS} where ttft or itl is given, else load)"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what in ("decode_kv", "prefill_queue"):
            down, up = getattr(self, f"{what}_scale_down_threshold"), getattr(self, f"{what}_scale_up_threshold")
            if down >= up:
                raise ValueError(f"{what}_scale_down_threshold ({down}) must be below {what}_scale_up_threshold ({up})")
        interval = "adjustment_interval" if self.policy == "load" else "throughput_adjustment_interval_seconds"
        if self.policy != "slo" and self.metric_pulling_interval > getattr(self, interval):
            raise ValueError(
                f"metric_pulling_interval ({self.metric_pulling_interval}) must not exceed "
                f"{interval} ({getattr(self, interval)}): there would be intervals without a sample"
            )
        if self.min_gpu_budget > self.max_gpu_budget:
            raise ValueError(
                f"min_gpu_budget ({self.min_gpu_budget}) must not exceed max_gpu_budget ({self.max_gpu_budget})"
            )
        if self.policy in ("sla", "slo") and self.min_endpoint == 0:
            raise ValueError(
                f"min_endpoint 0: the policy {self.policy} keeps one worker of each role, because its corrections are "
                "measured on workers that serve; say 1, or take throughput-load, whose throughput loop goes to 0 "
                "and back"
            )
        if self.policy == "throughput-load" and (why := throughput_load.wrong(self)) is not None:
            raise ValueError(why)
        check_plugins(self.scheduling, self.plugin_registration)
        return self


def known_names() -> dict[str, str]:
    """Every name that an option may be given by, with the option; of any policy."""
    fields = {name: name for name in PlannerConfig.model_fields}
    aliases = {alias: name for policy in POLICIES for alias, name in aliases_of(policy).items()}
    return fields | {alias: name for alias, name in aliases.items() if alias not in fields}


def planner_section(section: str, values: Mapping[str, Any]) -> PlannerConfig:
    """The options of these values, under any of their names, checked as a whole. Raises `ConfigError`.

    `section` says in the error where they stand.
    """
    policy = chosen_policy(values)
    found = own_names(section, values, policy)
    if policy == BY_TARGETS and "policy" not in found:
        found["policy"] = policy
    return validate_section(PlannerConfig, section, found)


def chosen_policy(values: Mapping[str, Any], otherwise: str = "load") -> str:
    """The policy that these values name. Where they name none: `slo` if they give a target for latencies."""
    if "policy" in values:
        return str(values["policy"])
    return BY_TARGETS if any(underscored(key) in _LATENCIES for key in values) else otherwise


def own_names(section: str, values: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The values under that policy's own names for its options. Raises `ConfigError` where one is given twice."""
    aliases = aliases_of(policy) if policy in POLICIES else {}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(underscored(key), key)
        if name in found:
            raise ConfigError(f"{section}: {key!r} and another spelling of it are both given; keep one")
        found[name] = value
    return found
