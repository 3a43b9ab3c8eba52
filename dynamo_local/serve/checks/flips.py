"""Which components' workers can change their role with each other: those whose engines are the same.

A flip keeps the process and its engine, so whatever an engine was started with must be the same in both sections: the
model, GPUs per worker, the engine and all of its arguments. What only a role reads may differ. The same goes for two
commands that are servers with a call that changes their role: their words may differ in the role's own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dynamo_local.commands.http_server.driver import HttpConfig
from dynamo_local.commands.launching import HTTP
from dynamo_local.components.engine_options import EngineConfig
from dynamo_local.config import Config
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section

ONLY_TOLD = frozenset({"forward_passes", "fpm_events", "served_model_name"})
"""Fields of both sections that the engine does not read; `name`, which the second makes, is compared."""
NO_PARTNER = "no other component has an engine like its own"
NOT_WANTED = "flippable is false in its ServiceArgs"
ONLY_OURS = frozenset({"role", "runtime", "command", "stop_timeout_s", "health_bound_s"})
"""Fields of both sections of servers that the server does not read; its command is compared apart."""
NOT_OURS = {
    HTTP: "runtime: http has a server of its own, and its section names no call that changes its role (`role-switch`)",
    "dynamo-1x": "workers of Dynamo 1.x take their role when they start, and register it themselves",
}


def with_flips(graph: LoadedGraph, spec: GraphSpec, config: Config) -> GraphSpec:
    """The graph in which each service says what its workers can become, or why they cannot."""
    prefill = [each for each in spec.services if each.role is Role.PREFILL]
    decode = [each for each in spec.services if each.role is Role.DECODE]
    if len(prefill) != 1 or len(decode) != 1:
        many = len(prefill) > 1 or len(decode) > 1
        why = "the graph has several components of that role, or of the other" if many else NO_PARTNER
        return _saying(spec, {each.name: (None, _own(each) or why) for each in (*prefill, *decode)})
    one, other = prefill[0], decode[0]
    blocked = ((each.name, _own(each) or _class(graph, each)) for each in (one, other))
    reasons = [f"{name}: {reason}" for name, reason in blocked if reason]
    reasons = reasons or list(_differences(graph, config, one, other))
    if reasons:
        return _saying(spec, dict.fromkeys((one.name, other.name), (None, "; ".join(reasons))))
    return _saying(spec, {one.name: (other.name, ""), other.name: (one.name, "")})


def _saying(spec: GraphSpec, said: dict[str, tuple[str | None, str]]) -> GraphSpec:
    def told(each: ServiceSpec) -> ServiceSpec:
        flips_to, why = said.get(each.name, (None, _own(each) or f"a {each.role} has no other role"))
        return replace(each, flips_to=flips_to, cannot_flip=why)

    return replace(spec, services=tuple(told(each) for each in spec.services))


def _own(spec: ServiceSpec) -> str | None:
    """Why workers of that service cannot flip, whatever the others are."""
    if spec.runtime is not None and not (spec.runtime == HTTP and spec.config.get("role_switch")):
        return NOT_OURS.get(spec.runtime, f"runtime: {spec.runtime}: what its command does is not ours to change")
    return None if spec.flippable else NOT_WANTED


def _class(graph: LoadedGraph, spec: ServiceSpec) -> str | None:
    service = graph.services[spec.name]
    model = service.config_model
    if model is None or not issubclass(model, EngineConfig | HttpConfig) or not hasattr(service.inner, "hand_over"):
        return "its class cannot hand its engine over (`sdk.flipping.Flippable`)"
    return None


def _differences(graph: LoadedGraph, config: Config, one: ServiceSpec, other: ServiceSpec) -> Iterator[str]:
    if one.runtime != other.runtime:
        yield f"runtime: {one.runtime or 'none'} in {one.name}, {other.runtime or 'none'} in {other.name}"
        return
    first, second = (_settings(graph, config, each) for each in (one, other))
    if not getattr(second, "remote_prefill", True):
        yield f"{other.name}: remote-prefill is off, so that no prefill worker would have work"
    if one.resources.gpu != other.resources.gpu:
        yield f"GPUs per worker: {one.resources.gpu} in {one.name}, {other.resources.gpu} in {other.name}"
    before, after = _engine_of(first), _engine_of(second)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(before, key)} in {one.name}, {_shown(after, key)} in {other.name}"
    differing = {key for key in one.envs.keys() | other.envs.keys() if one.envs.get(key) != other.envs.get(key)}
    if differing:  # a value may be a secret
        yield f"envs: {', '.join(sorted(differing))}"


def _settings(graph: LoadedGraph, config: Config, spec: ServiceSpec) -> Any:
    model: Any = graph.services[spec.name].config_model
    return validate_section(model, f"{config.source}: {spec.name}", spec.config)


def _engine_of(settings: Any) -> dict[str, Any]:
    """What its engine is started with."""
    if isinstance(settings, HttpConfig):
        words = tuple("{role}" if word == settings.role else word for word in settings.words)
        return {**settings.model_dump(exclude=set(ONLY_OURS)), "command": words}
    fields = {key: getattr(settings, key) for key in EngineConfig.model_fields if key not in ONLY_TOLD}
    given = {str(key).replace("-", "_"): value for key, value in (settings.model_extra or {}).items()}
    return {**fields, **given, "engine": settings.engine_name, "name": settings.name}


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not given"
