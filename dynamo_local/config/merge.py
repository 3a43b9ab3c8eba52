"""Sections as mappings: two spellings of one key become one, and what is laid over another is merged in depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import parse_envs
from dynamo_local.sdk.service_config import underscored

SERVICE_ARGS = "ServiceArgs"
COMMON_CONFIGS = "common_configs"
_ALIASES = {"start_deadline": "start_deadline_s", "drain_deadline": "drain_deadline_s"}
"""Keys of `ServiceArgs` that may be written without their unit."""
_NO_ALIASES: Mapping[str, str] = {}


def normalise(sections: Mapping[str, Mapping[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """Keys of sections, of `ServiceArgs` and of its `resources` with underscores; `envs` and deeper keys as written.

    Deeper keys belong to whoever reads them (`kv-transfer-config: {...}`). Raises `ConfigError` where both
    spellings of a key are given, or `ServiceArgs` is misspelt.
    """
    return {name: _normalise_section(name, section, source) for name, section in sections.items()}


def _normalise_section(name: str, section: Mapping[str, Any], source: str) -> dict[str, Any]:
    for key in section:
        if key != SERVICE_ARGS and key.replace("-", "").replace("_", "").lower() == "serviceargs":
            raise ConfigError(f"{source}: {name}: unknown key {key!r}; did you mean 'ServiceArgs'?")
    found = _underscored_keys(section, name, source, keep=SERVICE_ARGS)
    args = found.get(SERVICE_ARGS)
    if args is None:
        found.pop(SERVICE_ARGS, None)
        return found
    if not isinstance(args, Mapping):
        raise ConfigError(f"{source}: {name}: ServiceArgs must hold workers, resources, envs, …, not {args!r}")
    args = _underscored_keys(args, f"{name}.ServiceArgs", source, aliases=_ALIASES)
    if isinstance(args.get("resources"), Mapping):
        args["resources"] = _underscored_keys(args["resources"], f"{name}.ServiceArgs.resources", source)
    if "envs" in args:
        args["envs"] = _envs(args["envs"], name, source)
    found[SERVICE_ARGS] = args
    return found


def _envs(given: Any, name: str, source: str) -> dict[str, str]:
    """As a mapping, so that Dynamo's list form merges, and is masked, like ours."""
    try:
        return parse_envs(given)
    except ValueError as error:
        raise ConfigError(f"{source}: {name}.ServiceArgs: {error}") from None


def _underscored_keys(
    mapping: Mapping[str, Any], path: str, source: str, *, keep: str = "", aliases: Mapping[str, str] = _NO_ALIASES
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in mapping.items():
        name = key if key == keep else underscored(key)
        name = aliases.get(name, name)
        if name in found:
            raise ConfigError(f"{source}: {path}: {spelt[name]!r} and {key!r} are one key; keep one of them")
        found[name], spelt[name] = value, key
    return found


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: mappings are merged, everything else is replaced (lesson 21: `resources` survives `workers`).

    A key in the other spelling is the same key, and keeps the base's spelling.
    """
    merged = dict(base)
    spelling = {underscored(key): key for key in base}
    for key, value in over.items():
        own = key if key in merged else spelling.get(underscored(key), key)
        below = merged.get(own)
        merged[own] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
