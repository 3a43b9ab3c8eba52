"""Checks that `dynamo serve` makes before anything starts: access, dispatch, engines and flips."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.components.commands.http_server import HttpConfig
from dynamo_local.components.commands.launch import HTTP
from dynamo_local.components.engine_options import EngineConfig
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.config.loading import COMMON, COMMON_CONFIGS, HOST, Config, deep_merge
from dynamo_local.config.planner import LATENCY_ALIASES
from dynamo_local.core.secrets import parse_source
from dynamo_local.core.types import GraphSpec, Missing, Role, ServiceSpec
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import ConfigError, how_to_install
from dynamo_local.profile.reading import read_profile, shipped_profiles
from dynamo_local.sdk.checks import listing, nearest
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service_config import underscored
from dynamo_local.sdk.settings import accepted_names, validate_section
from dynamo_local.system.key_files import ApiKeys


@dataclass(frozen=True, slots=True)
class FixedPort:
    """A TCP port, and the option that says it."""

    option: str
    host: str
    number: int


def insecure(graph: LoadedGraph, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `--insecure` to the section of each Frontend."""
    overrides = {name: {"insecure": True} for name in graph.services if _options_of(graph, name) is not None}
    return deep_merge(sections, overrides)


def check_access(graph: LoadedGraph, spec: GraphSpec, config: Config, environ: Mapping[str, str]) -> None:
    """Raises `ConfigError` for unusable keys and certificates, for `--dry-run`, too."""
    for service, settings in _frontends(graph, spec):
        from dynamo_local.components.openai import access  # Starlette, which a graph without a Frontend never needs

        access.check(settings, {**environ, **service.envs}, service.name)
    if config.host.metrics_api_key is not None:
        ApiKeys.load(parse_source(config.host.metrics_api_key), environ, option=f"{HOST}.metrics-api-key")


def _options_of(graph: LoadedGraph, name: str) -> type[FrontendConfig] | None:
    """The options of a service that is a Frontend of ours, or a user's class with these options."""
    model: Any = graph.services[name].config_model
    return model if isinstance(model, type) and issubclass(model, FrontendConfig) else None


def _frontends(graph: LoadedGraph, spec: GraphSpec) -> Iterator[tuple[ServiceSpec, FrontendConfig]]:
    """Each Frontend with its options. Raises `ConfigError` for options that cannot be."""
    for service in spec.components:
        if (model := _options_of(graph, service.name)) is not None:
            yield service, validate_section(model, service.name, service.config)


def fixed_ports(graph: LoadedGraph, spec: GraphSpec) -> tuple[FixedPort, ...]:
    """The port of each Frontend that may not listen on any."""
    return tuple(
        FixedPort(f"{service.name}.port", settings.host, settings.port)
        for service, settings in _frontends(graph, spec)
        if settings.port
    )


def taken_ports(ports: Iterable[FixedPort]) -> Iterator[ConfigError]:
    """Each port that cannot be bound now. Another program may still take a port before the Frontend binds it."""
    for port in ports:
        from dynamo_local.components.openai.server import bind_socket  # Starlette, as above

        try:
            bind_socket(port.host, port.number, option=port.option).close()
        except ConfigError as error:
            yield error


def check_common(graph: LoadedGraph, config: Config) -> tuple[str, ...]:
    """A note for each key of `Common` that no service gets. Raises `ConfigError` for one that looks misspelt."""
    listed = {underscored(key) for section in config.sections.values() for key in section.get(COMMON_CONFIGS) or ()}
    known: dict[str, list[str]] = {}
    for name, service in graph.services.items():
        for key in accepted_names(service.config_model) if service.config_model is not None else ():
            known.setdefault(key, []).append(name)
    notes = []
    for key in config.sections.get(COMMON, {}):
        if key in listed or key in LATENCY_ALIASES:
            continue
        spelt = key.replace("_", "-")
        if key not in known and (near := nearest(spelt, [name.replace("_", "-") for name in known])):
            raise ConfigError(f"{config.source}: {COMMON}: unknown key {spelt!r}{near}", at=(COMMON, key))
        takers = f"; add it to those of {listing(known[key])}" if key in known else ""
        where = config.place((COMMON, key)) or config.source
        notes.append(f"{where}: {COMMON}: no common-configs lists {spelt!r}, so no service gets it{takers}")
    return tuple(notes)


def check_dispatch(graph: LoadedGraph, spec: GraphSpec, config: Config) -> tuple[str, ...]:
    """Notes about services that dispatch by targets, but have none, or fall back to thresholds.

    A further note says if services decide by different engines. Raises `ConfigError` for a profile that is given and
    cannot be read.
    """
    notes, times = [], {}
    for name, settings in _sections(graph, spec, config):
        try:
            lacks = settings.what_slo_lacks()
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {name}: {error}") from None
        if lacks is not None:
            notes.append(f"{name}: {lacks}; give profile-results-dir (docs/routing.md)")
        if not settings.wants_slo:
            continue
        if not settings.targets.given:
            notes.append(
                f"{name}: slo has no target to keep and only shortens waits; give ttft or itl (docs/routing.md)"
            )
        if not isinstance(found := settings.times(), Missing):
            times[name] = str(found)
    if len(set(times.values())) > 1:
        notes.append(_different(times))
    return tuple(notes)


def _sections(graph: LoadedGraph, spec: GraphSpec, config: Config) -> Iterator[tuple[str, Any]]:
    """Services that can decide by targets, and their settings."""
    for service in spec.components:
        model = graph.services[service.name].config_model
        if model is not None and hasattr(model, "what_slo_lacks"):
            yield service.name, validate_section(model, f"{config.source}: {service.name}", service.config)


def _different(times: Mapping[str, str]) -> str:
    said = ", ".join(f"{name} by {each}" for name, each in times.items())
    return (
        f"slo decides by different engines ({said}): give all the workers' sim or profile-results-dir, for example in "
        "common-configs (docs/routing.md)"
    )


log = logging.getLogger(__name__)


def _check_standby(service: ServiceSpec, options: Any) -> None:
    """Raises `ConfigError` if vLLM could never sleep with these options."""
    from dynamo_local.engines.vllm.sleep import NO_PLATFORM, connector_of, other_connector

    if service.standby is None:
        return
    why = None
    if not service.resources.gpu:
        why = f"{NO_PLATFORM.format(platform='CPU')}, and its workers have no GPU"
    else:
        why = other_connector(connector_of(options.args.get("kv_transfer_config")))
    if why is not None:
        raise ConfigError(f"ServiceArgs.standby cannot be: {why}; remove it")


def check_sim_profiles(graph: LoadedGraph, spec: GraphSpec, config: Config) -> None:
    """Raises `ConfigError` for a sim engine's own profile that cannot be read. For `--dry-run`: the reader needs numpy,
    which an arbiter does without. In a real start, the worker says the same."""
    for service in spec.components:
        model = graph.services[service.name].config_model
        if not isinstance(model, type) or not issubclass(model, EngineConfig):
            continue
        settings: Any = validate_section(model, f"{config.source}: {service.name}", service.config)
        if settings.engine_name != "sim":
            continue
        profile = SimOptions.from_mapping(settings.sim).profile
        try:
            if profile not in shipped_profiles():
                read_profile(profile)
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {service.name}: sim.profile: {error}") from None


def check_engines(graph: LoadedGraph, spec: GraphSpec, config: Config, *, only_plan: bool = False) -> tuple[str, ...]:
    """Raises `ConfigError` that names the section and the key that vLLM refuses.

    A wrong option must not cost a start on a GPU. With `only_plan` (`--dry-run`) a host without vLLM, or without the
    model's folder, gives a note instead: the plan is good for another host.
    """
    from dynamo_local.engines.vllm.checks import VllmSection, is_installed, what_is_wrong

    sections, notes = {}, dict[str, str]()
    for service in spec.components:
        model = graph.services[service.name].config_model
        if model is None or not hasattr(model, "vllm_options"):
            continue
        settings: Any = validate_section(model, f"{config.source}: {service.name}", service.config)
        if (why := settings.why_no_model()) is not None:
            notes[why] = service.name
        if settings.engine_name != "vllm":
            continue
        try:
            options = settings.vllm_options(service.resources.gpu)
            _check_standby(service, options)
            arguments = replace(options, sleep_mode=service.standby is not None).arguments()
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {service.name}: {error}") from None
        sections[service.name] = VllmSection(tuple(arguments), tuple(accepted_names(model)))
    if notes and not only_plan:
        why, name = next(iter(notes.items()))
        raise ConfigError(f"{config.source}: {name}: {why}", at=(name, "model"))
    told = tuple(f"{name}: {why}" for why, name in notes.items())
    if not sections:
        return told
    if not is_installed():
        named = ", ".join(sections)
        missing = f"{named}: the engine is vllm, which is not installed here"
        how = f"{how_to_install('vllm')} (docs/vllm.md), or set engine: sim"
        if only_plan:
            return (*told, f"{missing}, so its options were not checked; to serve here, {how}")
        raise ConfigError(f"{missing}; {how}")
    for name, why in what_is_wrong(sections).items():
        raise ConfigError(f"{config.source}: {name}: {why}", at=(name,))
    return told


# Workers of two components can change roles if their engines are the same: model, GPUs per worker, engine and all of
# its arguments. Fields that only a role reads may differ. Two commands can flip if they are servers with a call that
# changes their role. Their command lines may differ in the role's own name.

ONLY_TOLD = frozenset({"forward_passes", "fpm_events", "served_model_name"})
"""Fields of both sections that the engine does not read. `name`, which the second makes, is compared."""
NO_PARTNER = "no other component has an engine like its own"
NOT_WANTED = "flippable is false in its ServiceArgs"
ONLY_OURS = frozenset({"role", "runtime", "command", "stop_timeout_s", "health_bound_s"})
"""Fields of servers' sections that the server does not read. Its command is compared separately."""
NOT_OURS = {
    HTTP: "runtime: http has a server of its own, and its section names no call that changes its role (`role-switch`)",
    "dynamo-1x": "workers of Dynamo 1.x take their role when they start, and register it themselves",
}


def with_flips(graph: LoadedGraph, spec: GraphSpec, config: Config) -> GraphSpec:
    """The graph in which each service says which role its workers can take, or why they cannot flip."""
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
    def with_reason(each: ServiceSpec) -> ServiceSpec:
        flips_to, why = said.get(each.name, (None, _own(each) or f"a {each.role} has no other role"))
        return replace(each, flips_to=flips_to, cannot_flip=why)

    return replace(spec, services=tuple(with_reason(each) for each in spec.services))


def _own(spec: ServiceSpec) -> str | None:
    """Why workers of that service cannot flip, whatever the others are. None if they may."""
    if spec.runtime is not None and not (spec.runtime == HTTP and spec.config.get("role_switch")):
        return NOT_OURS.get(spec.runtime, f"runtime: {spec.runtime}: what its command does is not ours to change")
    return None if spec.flippable else NOT_WANTED


def _class(graph: LoadedGraph, spec: ServiceSpec) -> str | None:
    service = graph.services[spec.name]
    model = service.config_model
    if model is None or not issubclass(model, EngineConfig | HttpConfig) or not hasattr(service.inner, "hand_over"):
        return "its class cannot hand its engine over (`sdk.context.Flippable`)"
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
    """The arguments with which its engine is started."""
    if isinstance(settings, HttpConfig):
        arguments = tuple("{role}" if word == settings.role else word for word in settings.words)
        return {**settings.model_dump(exclude=set(ONLY_OURS)), "command": arguments}
    fields = {key: getattr(settings, key) for key in EngineConfig.model_fields if key not in ONLY_TOLD}
    given = {str(key).replace("-", "_"): value for key, value in (settings.model_extra or {}).items()}
    return {**fields, **given, "engine": settings.engine_name, "name": settings.name}


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not given"
