"""Checks that a planner's profile fits the running engines: before a start, and while the planner runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_local.clock import Clock, Turns
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.types import GraphSpec, Missing
from dynamo_local.errors import ConfigError, DynamoError
from dynamo_local.planner.sources import PassTracker
from dynamo_local.planner.values import Engines
from dynamo_local.profile.document import Document, differences, read_document
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.judgement import Drift, Drifted, words
from dynamo_local.profile.reading import DEFAULT_PROFILE, nearest_shipped, profile_folder

MEASURED = ("sla", "slo", "throughput-load")
"""Policies that use a profile."""
SIMULATED = "Simulated"
"""Names of simulated devices begin with this."""


def profile_of(config: PlannerConfig) -> str | None:
    """Name or folder of the profile of these options. None without one."""
    if config.policy not in MEASURED or (config.policy == "throughput-load" and config.optimization_target != "sla"):
        return None
    if config.profile_results_dir is not None:
        return str(config.profile_results_dir)
    return DEFAULT_PROFILE if config.policy == "slo" else None


def with_nearest(config: PlannerConfig, graph: GraphSpec, devices: Iterable[GpuDevice]) -> PlannerConfig:
    """The options with a profile for `slo` if none is given.

    Simulated engines have a profile of their own. Otherwise it is the shipped one that is nearest to this host's GPUs.
    """
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


def check_profile(
    config: PlannerConfig, graph: GraphSpec, gpus: Iterable[str] | None = None, *, patient: bool = False
) -> None:
    """Raise `ConfigError` with all differences. `gpus` are the names of the devices, if known.

    `patient`: the caller may wait some seconds for vLLM's defaults. The arbiter's loop may not.

    A profile without `profile.json` (Dynamo's own, and the shipped ones) does not say where it was measured.
    """
    if config.policy not in MEASURED or config.profile_results_dir is None or config.profile_anyway:
        return
    name = str(config.profile_results_dir)
    document = read_document(Path(profile_folder(name)))
    if document is None:
        return
    from dynamo_local.components.engine_facts import (
        default_options,
        engine_version,
        engines_of,  # the workers' libraries need these devices
    )

    running = engines_of(graph)
    versions = {engine["engine"]: engine_version(engine["engine"]) for engine in running.values()}
    names = None if gpus is None else frozenset(gpus)
    found = differences(document, running, names, versions)
    if found:  # engines are asked for their defaults only if these may matter
        defaults = {engine: default_options(engine, patient=patient) for engine in versions}
        found = differences(document, running, names, versions, defaults)
    if found:
        raise ConfigError(
            f"Planner: the profile {name} was measured of something else: {'; '.join(found)}. Measure these engines "
            "(`dynamo profile`), or take it all the same: profile-anyway"
        )


log = logging.getLogger(__name__)

EVERY_S = 10.0


class ProfileDrift:
    """Compares a planner's profile with the passes of serving engines, while such a planner runs.

    Every ten seconds each worker is asked for at most 64 of its passes. `ask` gives the passes since the tracker's last
    ones. `follow` begins for a planner's options, `close` ends.
    """

    def __init__(self, ask: Callable[[PassTracker], Awaitable[Engines]], clock: Clock, tell: Tell) -> None:
        self._ask = ask
        self._clock = clock
        self._tell = tell
        self._name: str | None = None
        self._document: Document | None = None
        self._drift: Drift | None = None
        self._task: asyncio.Task[None] | None = None

    def follow(self, options: PlannerConfig) -> None:
        """Compare with the profile of these options. The comparison goes on if the profile is the same."""
        name = profile_of(options)
        if name == self._name:
            return
        self.close()
        self._name = name
        if name is not None:
            self._task = asyncio.create_task(self._watch(name), name="comparing engines with their profile")

    def close(self) -> None:
        """Stop comparing, and remove its note."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        for component, kind in () if self._drift is None else self._drift.noted:
            self._tell(f"{component} {kind} is not compared with a profile any more", Over(_trouble(component, kind)))
        self._name = self._document = self._drift = None

    def figures(self) -> tuple[Drifted, ...]:
        """The drift of the last minutes. Empty before there were enough passes."""
        return () if self._drift is None else self._drift.figures(self._clock.now_s())

    def status(self) -> dict[str, Any]:
        if self._name is None:
            return {"profile": None, "drift": []}
        state = None if self._document is None else self._document.certificate.state
        profile = {"name": self._name, "measured": self._document is not None, "certificate": state}
        return {"profile": profile, "drift": [asdict(each) for each in self.figures()]}

    async def _watch(self, name: str) -> None:
        try:
            model = await asyncio.to_thread(ProfileModel.load, name)
            self._document = await asyncio.to_thread(read_document, profile_folder(name))
        except DynamoError as error:  # the policy reports it, too, and did not start
            log.warning("nothing is compared with the profile %s: %s", name, error)
            return
        self._drift, tracker = Drift(model), PassTracker()
        while True:
            await self._clock.sleep_until(self._clock.now_s() + EVERY_S)
            try:
                await self._look(self._drift, tracker)
            except DynamoError as error:  # NATS is away
                log.debug("nothing was compared with the profile: %s", error)
            except Exception:  # a defect must not end the comparison in silence
                log.exception("comparing the engines with their profile failed, and is tried again")

    async def _look(self, drift: Drift, tracker: PassTracker) -> None:
        turns = Turns()
        for seen in (await self._ask(tracker)).values():
            await turns.next()
            drift.seen(seen.component, seen.passes)
        began, over = drift.news(drift.figures(self._clock.now_s()))
        for each in began:
            self._tell(
                f"engines are off their profile {self._name}: {words(each)}; measure them again (`dynamo profile`)",
                Trouble(_trouble(each.component, each.kind)),
            )
        for each in over:
            self._tell(f"{words(each)}: as its profile again", Over(_trouble(each.component, each.kind)))


def _trouble(component: str, kind: str) -> str:
    return f"{component}'s profile, {kind}"
