"""Targets for latencies, and the profile by which requests are dispatched: options of the services that have them.

Targets are said once: in `Planner`, in `Common`, or on the command line. `with_targets` gives them to all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

from dynamo_local.components.engine_options import check_sim_options
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.config.loading import COMMON, PLANNER, Config
from dynamo_local.config.planner import BY_TARGETS, LATENCY_ALIASES
from dynamo_local.config.planner_section import planner_section, takes_targets
from dynamo_local.core.prewarmed import engine_of
from dynamo_local.core.routing.choice import RouterPolicy
from dynamo_local.core.routing.estimates import Costs, Targets, Timing
from dynamo_local.core.types import Missing, Role
from dynamo_local.errors import ConfigError
from dynamo_local.profile.reading import PROFILE_DOCUMENT
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service_config import underscored

log = logging.getLogger(__name__)


class LatencyTargets(BaseModel):
    """Targets of a service. Its default is those of `Planner`, `Common`, `--ttft` and `--itl`."""

    ttft: float | None = Field(
        default=None,
        gt=0,
        description="Target for the time to first token, ms. Default: that of `Planner`, `Common` or `--ttft`.",
    )
    itl: float | None = Field(
        default=None,
        gt=0,
        description="Target for a request's mean gap between tokens, ms. Default: that of `Planner`, `Common` or "
        "`--itl`.",
    )

    @property
    def targets(self) -> Targets:
        """Those that were configured, in seconds."""
        return Targets.of_ms(self.ttft, self.itl)


class TargetOptions(LatencyTargets):
    """Options that Processor, Router and VllmWorker have in common. With a target, their default is `slo`."""

    profile_results_dir: str | None = Field(
        default=None,
        min_length=1,
        description="The engine's profile, for `slo`: a folder, or the name of one that ships (docs/profiles.md). "
        "Default: the Planner's for vLLM, which has none; that of the sim engine.",
    )

    @property
    def wants_slo(self) -> bool:
        """Whether this service is to decide by targets."""
        raise NotImplementedError

    def times(self) -> EngineTimes | Missing:
        """The name of the engine whose times decide."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The profile's name, and the speed that divides its times."""

    profile: str
    speed: float

    def __str__(self) -> str:
        return f"the profile {self.profile} at speed {self.speed:g}"

    def timing(self) -> Timing:
        """The times themselves. Raises `ConfigError` for a profile that cannot be read."""
        from dynamo_local.profile.interpolation import ProfileModel

        return Timing(ProfileModel.load(self.profile), self.speed)


def times_of(profile: str | None, sim: dict[str, Any] | None) -> EngineTimes | Missing:
    """The source of estimates: that profile, or the one of the sim engine with these options. None: the engine is
    another one."""
    from dynamo_local.engines.sim.options import SimOptions

    options = None if sim is None else SimOptions.from_mapping(sim)
    name = profile or (None if options is None else options.profile)
    if name is None:
        return Missing("no profile-results-dir is given, and the engine's times are not known")
    # A profile that `dynamo profile` measured has the speed of these engines in it.
    measured = profile is not None and (Path(profile).expanduser() / PROFILE_DOCUMENT).is_file()
    return EngineTimes(name, 1.0 if options is None or measured else options.speed)


class RoutingOptions(TargetOptions):
    """Those of Processor and Router, which have no engine."""

    router: RouterPolicy | None = None
    sim: dict[str, Any] | None = Field(
        default=None,
        description="For slo: the sim engine's options, as the workers have them (list `sim` in common-configs).",
    )

    @field_validator("sim")
    @classmethod
    def _sim_options(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if value is None else check_sim_options(value)

    @property
    def policy(self) -> RouterPolicy:
        """The router in force: by default slo where there are targets."""
        return self.router or ("slo" if self.targets.given else "least-loaded")

    @property
    def wants_slo(self) -> bool:
        return self.policy == "slo"

    def times(self) -> EngineTimes | Missing:
        sim = self.sim if self.sim is not None or getattr(self, "model", None) != TINY_MODEL else {}
        return times_of(self.profile_results_dir, sim)

    def costs(self) -> Costs | Missing:
        """The costs that `slo` decides by. Raises `ConfigError`."""
        times = self.times()
        return times if isinstance(times, Missing) else Costs(times.timing(), self.targets)

    def what_slo_lacks(self) -> str | None:
        """Why `slo` cannot decide although it is wanted; None: it can, or it is not. Raises `ConfigError`."""
        if not self.wants_slo or not isinstance(costs := self.costs(), Missing):
            return None
        return f"router slo picks as least-loaded: {costs.reason}"


def usable_costs(options: RoutingOptions) -> Costs | None:
    """The costs that `slo` decides by. None, with a line in the log if `slo` is wanted, if there are none. Raises
    `ConfigError`."""
    costs = options.costs()
    if not isinstance(costs, Missing):
        return costs
    if (lacks := options.what_slo_lacks()) is not None:
        log.warning("%s", lacks)
    return None


# --- said once
# Targets that are said in one place hold for the planner, dispatch, routing, and the Frontend's counts.


def with_targets(graph: LoadedGraph, config: Config, given: Mapping[str, float | None]) -> Config:
    """The configuration with its targets in the sections of all services that take them, and of the planner.

    `given` has the command line's `ttft` and `itl`, ms. Raises `ConfigError` that names both places of a target that
    has two values.
    """
    takers = {
        name: service.config_model
        for name, service in graph.services.items()
        if isinstance(service.config_model, type) and issubclass(service.config_model, LatencyTargets)
    }
    shared: dict[str, Any] = {}
    for target in LATENCY_ALIASES:
        places = list(_places(target, graph, config, given))
        own = [(f"{name}.{target}", config.sections.get(name, {})[target]) for name in takers
               if target in config.sections.get(name, {})]  # fmt: skip
        _agree(config.source, [*places, *own])
        if places:
            shared[target] = places[0][1]
    config = _with_planner(graph, config, shared)
    shared = {**_planned(graph, config), **shared}
    sections = {name: dict(section) for name, section in config.sections.items()}
    for name, model in takers.items():
        aims = shared or any(target in sections.get(name, {}) for target in LATENCY_ALIASES)
        more = {**shared, **(_engine(graph, config, name, model) if aims else {})}
        seen = config.service(name)
        if more := {key: value for key, value in more.items() if key not in seen}:
            sections[name] = {**sections.get(name, {}), **more}
    return replace(config, sections=sections)


def _places(
    target: str, graph: LoadedGraph, config: Config, given: Mapping[str, float | None]
) -> Iterator[tuple[str, Any]]:
    """Where a target is said for all, and its value."""
    if given.get(target) is not None:
        yield f"--{target}", given[target]
    names = (target, LATENCY_ALIASES[target])
    for key, value in _planner(graph, config).items():
        if underscored(key) in names:
            yield f"{PLANNER}.{key}", value
    if (value := config.sections.get(COMMON, {}).get(target)) is not None:
        yield f"{COMMON}.{target}", value


def _agree(source: str, places: list[tuple[str, Any]]) -> None:
    for where, value in places[1:]:
        if value != places[0][1]:
            raise ConfigError(
                f"{source}: {places[0][0]} is {places[0][1]}, and {where} is {value}; say a target once (it holds for "
                "the planner and for all services), or give both the same value"
            )


def _planner(graph: LoadedGraph, config: Config) -> dict[str, Any]:
    """The section of the planner. A graph's own Planner service keeps its keys."""
    return {} if PLANNER in graph.services else config.service(PLANNER)


def _with_planner(graph: LoadedGraph, config: Config, shared: Mapping[str, Any]) -> Config:
    """The planner takes the targets that stand elsewhere (`takes_targets`)."""
    section = _planner(graph, config)
    if PLANNER in graph.services or not takes_targets(section):
        return config
    keys = {underscored(key) for key in section}
    more = {key: value for key, value in shared.items() if not keys & {key, LATENCY_ALIASES[key]}}
    if PLANNER not in config.sections:
        return replace(config, planner_targets=more)
    own = {**config.sections[PLANNER], **more}
    return replace(config, sections={**config.sections, PLANNER: own})


def _planned(graph: LoadedGraph, config: Config) -> dict[str, Any]:
    """The targets of the policy `slo`, with its defaults: the services keep what the planner aims at."""
    section = _planner(graph, config)
    if not section:
        return {}
    planner = planner_section(f"{config.source}: {PLANNER}", section)
    return {"ttft": planner.ttft_ms, "itl": planner.itl_ms} if planner.policy == BY_TARGETS else {}


def _engine(graph: LoadedGraph, config: Config, name: str, model: type[LatencyTargets]) -> dict[str, Any]:
    """Where the engine's times come from, for a service with targets that does not say it.

    Processor and Router take what their worker says. A worker of vLLM takes the planner's profile.
    """
    seen = config.service(name)
    if not issubclass(model, TargetOptions) or seen.keys() & {"sim", "profile_results_dir"}:
        return {}
    workers = [each for each, service in graph.services.items() if service.role in (Role.DECODE, Role.AGGREGATED)]
    if len(workers) != 1:
        return {}
    worker = config.service(workers[0])
    simulated = engine_of(worker.get("engine"), worker.get("model"), TINY_MODEL) == "sim"
    profile = worker.get("profile_results_dir")
    if profile is None and not simulated:
        profile = _planner(graph, config).get("profile_results_dir")
    found = {} if profile is None else {"profile_results_dir": profile}
    if simulated and "sim" in worker and issubclass(model, RoutingOptions):
        found["sim"] = worker["sim"]
    return found
