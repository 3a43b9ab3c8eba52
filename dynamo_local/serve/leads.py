"""Lead times, joined to a run: measured by who watches the shell, kept for the run and, in a file, for this host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.control.deployment import Launcher
from dynamo_local.core.lead_times import LeadTimes
from dynamo_local.core.spares import engine_of
from dynamo_local.core.types import ServiceSpec
from dynamo_local.errors import StateError
from dynamo_local.state import LeadFile

log = logging.getLogger(__name__)


class Leads:
    """The lead times of one run. `background` runs what takes time."""

    def __init__(
        self, launcher: Launcher, file: LeadFile, background: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._launcher = launcher
        self._file = file
        self._background = background
        self._writing = asyncio.Lock()
        self.known = LeadTimes()

    def remember(self) -> None:
        """Take what earlier runs measured, of what now runs. A file that cannot be read is logged."""
        graph = self._launcher.factory.graph
        of = {service.name: what_it_runs(service) for service in graph.services}
        try:
            self.known = LeadTimes(self.known.run, self._file.read(graph.namespace, of))
        except StateError as error:
            log.warning("the lead times of earlier runs are not known: %s", error)

    def note(self, rung: str, component: str, seconds: float) -> None:
        """One more: from the decision until it serves. Whoever brings a worker into service by a way of its own (a
        flip, a wake) calls this with its rung."""
        self.known = self.known.noted(rung, component, seconds)
        self._background(self._keep(rung, component, seconds))

    async def _keep(self, rung: str, component: str, seconds: float) -> None:
        factory = self._launcher.factory
        of = what_it_runs(factory.service(component))
        async with self._writing:
            try:
                await asyncio.to_thread(self._file.add, factory.graph.namespace, component, of, rung, seconds)
            except StateError as error:
                log.warning("a lead time was not kept for later runs: %s", error)

    def status(self) -> list[dict[str, Any]]:
        """For `dynamo status --json` and `dynamo planner status`."""
        return self.known.as_json()


def what_it_runs(service: ServiceSpec) -> str:
    """Engine and model, on how many GPUs: the lead times of another one say nothing about it."""
    if service.runtime is not None:
        return service.runtime
    model = service.config.get("model")
    engine = engine_of(service.config.get("engine"), model, TINY_MODEL)
    return f"{engine}:{model or TINY_MODEL}:{service.resources.gpu}"
