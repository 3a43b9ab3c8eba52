"""The engines of a graph, as far as a profile of them depends on it: what is compared with `profile.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from dynamo_local import __version__
from dynamo_local.components.prefill_worker import PrefillWorkerConfig
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.components.vllm_worker import VllmWorkerConfig
from dynamo_local.core.prewarmed import engine_of
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.vllm import checks as vllm_checks
from dynamo_local.sdk.service_config import underscored

_THE_ENGINES = frozenset({"model", "max_model_len", "sim"})
"""Options of our workers' sections that change the time of a pass, or how many tokens fit. Keys that are not options
of ours (vLLM's arguments) do so, too."""
_OURS = frozenset({*VllmWorkerConfig.model_fields, *PrefillWorkerConfig.model_fields}) - _THE_ENGINES


def engines_of(graph: GraphSpec) -> dict[str, dict[str, Any]]:
    """The facts of `profile.document.described`, by role (prefill, decode or agg). A component that is a command has
    its command there: all that its engine's speed depends on stands in it."""
    found = {}
    for service in graph.services:
        role = _ROLES.get(service.role)
        if role is not None:
            found[role] = engine_description(service) if service.runtime is None else command_description(service)
    if "decode" in found and "prefill" not in found:
        found["agg"] = found.pop("decode")
    return found


_PACKAGES: Mapping[str, str] = {"dynamo-1x": "ai-dynamo"}
_ROLES: Mapping[Role, str] = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.AGGREGATED: "agg"}


def engine_description(service: ServiceSpec) -> dict[str, Any]:
    """The engine of one component."""
    model = service.config.get("model")
    options = _flat({key: value for key, value in service.config.items() if underscored(key) not in _OURS})
    options.setdefault("model", TINY_MODEL)
    return {
        "engine": engine_of(service.config.get("engine"), model, TINY_MODEL),
        "gpus": service.resources.gpu,
        "options": options,
    }


def command_description(service: ServiceSpec) -> dict[str, Any]:
    """The same of a component that is a command; its `engine` is its runtime."""
    command = service.config["command"]
    words = command if isinstance(command, str) else " ".join(map(str, command))
    model = service.config.get("model")
    options = {"command": words, **({} if model is None else {"model": model})}
    return {"engine": service.runtime, "gpus": service.resources.gpu, "options": options}


def engine_version(engine: str) -> str:
    """The version of the engine's package. The sim engine has ours. Nobody knows that of a server which is a
    command."""
    if engine == "sim":
        return __version__
    try:
        return metadata.version(_PACKAGES.get(engine, engine))
    except metadata.PackageNotFoundError:
        return "unknown"


def default_options(engine: str, *, patient: bool) -> dict[str, Any]:
    """The options that an engine has if none are given, named as in `engine_description`. Empty if they are unknown.

    vLLM tells its own in a process that takes seconds: only a `patient` caller asks it. Raises `ConfigError` if an
    installed vLLM cannot run.
    """
    if engine == "sim":
        fields = {field.name: field.default for field in dataclasses.fields(SimOptions)}
        return _flat({"sim": fields})
    asked = patient and engine == "vllm" and vllm_checks.is_installed()
    return _flat(vllm_checks.defaults()) if asked else {}


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"sim": {"speed": 10}}` -> `{"sim.speed": 10}`; keys with underscores, numbers as YAML may write them."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{underscored(str(key))}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif value is not None:
            found[name] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return found
