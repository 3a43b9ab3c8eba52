"""The `Planner` section from what people write: YAML, `--Planner.KEY=VALUE`, and words such as `ttft=200`."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dynamo_local.config.loading import parse_value
from dynamo_local.config.planner import (
    BY_TARGETS,
    LATENCY_ALIASES,
    POLICIES,
    PlannerConfig,
    aliases_of,
    known_names,
    options_of,
)
from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.sdk.checks import listing, nearest, respelt
from dynamo_local.sdk.service_config import underscored
from dynamo_local.sdk.settings import validate_section

_LATENCIES = frozenset({"ttft_ms", "itl_ms", *LATENCY_ALIASES})


def planner_section(section: str, values: Mapping[str, Any]) -> PlannerConfig:
    """The options of these values, under any of their names, checked as a whole. Raises `ConfigError`.

    `section` says in the error where they stand.
    """
    policy = chosen_policy(values)
    found = own_names(section, values, policy)
    if policy == BY_TARGETS and "policy" not in found:
        found["policy"] = policy
    try:
        return validate_section(PlannerConfig, section, found)
    except ConfigError as error:
        aliases = aliases_of(policy) if policy in POLICIES else {}
        written = {aliases.get(underscored(key), underscored(key)): key for key in values}
        at = tuple(written.get(key, key) for key in error.details.get("at", ()))
        text = respelt(str(error).removeprefix(section), written)
        raise ConfigError(f"{section}{text}", **{**error.details, "at": at}) from None


def chosen_policy(values: Mapping[str, Any], otherwise: str = "load") -> str:
    """The policy that these values name. Where they name none: `slo` if they give a target for latencies."""
    if "policy" in values:
        return str(values["policy"])
    return BY_TARGETS if any(underscored(key) in _LATENCIES for key in values) else otherwise


def takes_targets(values: Mapping[str, Any]) -> bool:
    """Whether a planner with these options takes targets that stand elsewhere.

    Without a policy it does, and is then `slo`, unless it has an option that `slo` lacks.
    """
    if "policy" in values:
        return values["policy"] in POLICIES and "ttft_ms" in options_of(values["policy"])
    return {underscored(key) for key in values} <= {*options_of(BY_TARGETS), *aliases_of(BY_TARGETS)}


def own_names(section: str, values: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The values under that policy's own names for its options. Raises `ConfigError` where one is given twice."""
    aliases = aliases_of(policy) if policy in POLICIES else {}
    has_targets = policy not in POLICIES or "ttft_ms" in options_of(policy)
    found: dict[str, Any] = {}
    for key, value in values.items():
        if underscored(key) in LATENCY_ALIASES and not has_targets:
            said = f"{section}: {key!r} is a target, and the policy {policy!r} has none; remove one of them"
            raise ConfigError(said, at=("Planner", key))
        name = aliases.get(underscored(key), key)
        if name in found:
            raise ConfigError(f"{section}: {key!r} and another spelling of it are both given; keep one")
        found[name] = value
    return found


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` each; a later one wins. Raises `BadInput` naming the word. Values are checked where they apply."""
    found = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise BadInput(f"{setting!r} is no KEY=VALUE, such as decode-kv-scale-up-threshold=0.8")
        if name not in known_names():
            known = [field.replace("_", "-") for field in PlannerConfig.model_fields]
            near = nearest(name.replace("_", "-"), known)
            raise BadInput(f"{key!r} is no option of the planner; there are: {listing(known)}{near}")
        found[name] = option_value(name, text.strip())
    return found


def option_value(name: str, text: str) -> Any:
    """The value of one option: text where the option is text, else as on the command line. `none` is none."""
    annotation = PlannerConfig.model_fields[known_names()[name]].annotation
    kinds = typing.get_args(annotation)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    return text if _is_text(annotation) else parse_value(text)


def _is_text(annotation: Any) -> bool:
    """Whether all that may be given are texts: words, names, paths."""
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(value, str) for value in typing.get_args(annotation))
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    if members:
        return all(_is_text(member) for member in members)
    return annotation in (str, Path)
