"""Whether the profile that a planner is to go by was measured of the engines that run: else it is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from dynamo_local.config import PlannerConfig
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import GraphSpec, Missing
from dynamo_local.errors import ConfigError
from dynamo_local.profiles import DEFAULT_PROFILE, nearest_shipped, profile_folder
from dynamo_local.profiles.measuring.document import differences, read_document

MEASURED = ("sla", "slo", "throughput-load")
"""Policies that go by a profile."""
SIMULATED = "Simulated"
"""So the names of simulated devices begin."""


def profile_of(config: PlannerConfig) -> str | None:
    """Name or folder of the profile that a planner with these options goes by; None: it goes by none."""
    if config.policy not in MEASURED or (config.policy == "throughput-load" and config.optimization_target != "sla"):
        return None
    if config.profile_results_dir is not None:
        return str(config.profile_results_dir)
    return DEFAULT_PROFILE if config.policy == "slo" else None


def with_nearest(config: PlannerConfig, graph: GraphSpec, devices: Iterable[GpuDevice]) -> PlannerConfig:
    """The options with the profile that `slo` begins with where none is given: the one that simulated engines play,
    else the shipped one that is nearest to the GPUs of this host."""
    if config.policy != "slo" or config.profile_results_dir is not None:
        return config
    device = next(iter(devices), None)
    sims = [service.config["sim"] for service in graph.services if isinstance(service.config.get("sim"), Mapping)]
    played = next((str(sim["profile"]) for sim in sims if sim.get("profile")), None)
    if device is None or device.name.startswith(SIMULATED):
        name = played or DEFAULT_PROFILE
    else:
        memory = device.memory_total_bytes
        name = nearest_shipped(device.name, None if isinstance(memory, Missing) else memory)
    return config.model_copy(update={"profile_results_dir": Path(name)})


def check_profile(config: PlannerConfig, graph: GraphSpec, gpus: Iterable[str] | None = None) -> None:
    """Raise `ConfigError` with all that differs; `gpus` are the names of the devices, where they are known.

    A profile without `profile.json` (Dynamo's own, and those that ship) says nothing of what it was measured on.
    """
    if config.policy not in MEASURED or config.profile_results_dir is None or config.profile_anyway:
        return
    name = str(config.profile_results_dir)
    document = read_document(Path(profile_folder(name)))
    if document is None:
        return
    from dynamo_local.components.engine_facts import engine_version, engines_of  # the workers' libraries come with it

    running = engines_of(graph)
    versions = {engine["engine"]: engine_version(engine["engine"]) for engine in running.values()}
    found = differences(document, running, None if gpus is None else frozenset(gpus), versions)
    if found:
        raise ConfigError(
            f"Planner: the profile {name} was measured of something else: {'; '.join(found)}. Measure these engines "
            "(`dynamo profile`), or take it all the same: profile-anyway"
        )
