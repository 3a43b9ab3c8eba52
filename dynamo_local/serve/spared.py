"""Spares, joined to a run: whom they serve, what they are marked with, and when they are started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, cast

from dynamo_local.clock import Clock
from dynamo_local.control.deployment import Deployment, Launcher
from dynamo_local.control.shell import Shell
from dynamo_local.control.spares.kinds import Kind, Kinds
from dynamo_local.control.spares.pool import SpareRules, Spares
from dynamo_local.control.spares.starting import SparedHost
from dynamo_local.control.tasks import Tasks
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.life.instructions import Transition
from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.life.stimuli import Stimulus
from dynamo_local.core.notes import Tell
from dynamo_local.state import SpareEntry
from dynamo_local.succession.marks import marks
from dynamo_local.system.process_host import ProcessHost, SpareHost


class Spared:
    """The spares of one run, and the host of its workers, which uses them. An observer of its shell."""

    def __init__(
        self, deployment: Deployment, launcher: Launcher, host: ProcessHost, clock: Clock, tasks: Tasks, tell: Tell
    ) -> None:
        self._launcher = launcher
        self._shell: Shell | None = None
        self._env: Callable[[], Mapping[str, str]] = dict
        self._kinds = Kinds(launcher, lambda: self._env(), deployment.gpus)
        self._impossible = not hasattr(host, "rename_process")
        self._tell = tell
        self.spares = self._pool(deployment, host, clock, tasks, tell) if deployment.settings.spares else None
        self.host = SparedHost(host, self.spares, self._kind_of)

    def _pool(self, deployment: Deployment, host: ProcessHost, clock: Clock, tasks: Tasks, tell: Tell) -> Spares | None:
        if self._impossible:
            return None
        settings, paths = deployment.settings, deployment.paths
        rules = SpareRules(
            count=settings.spares,
            marks=partial(marks, deployment.graph.namespace, paths.statefile, deployment.run_id),
            visible=self._kinds.visible,
            log_level=os.environ.get("DYN_LOG"),
            death_signal=None if settings.keep_on_arbiter_death else signal.SIGKILL,
            start_deadline_s=settings.start_deadline_s,
        )
        spare_host = cast(SpareHost, host)
        return Spares(
            spare_host,
            paths,
            rules,
            clock,
            wanted=self._kinds.wanted,
            calm=self._calm,
            background=tasks.run,
            tell=tell,
        )

    def connect(self, shell: Shell, env: Callable[[], Mapping[str, str]]) -> None:
        """Whose workers these are, and what those are told of etcd and NATS."""
        self._shell, self._env = shell, env
        shell.observers.append(self)

    def begin(self, tasks: Tasks, on_change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The run is ready: from now on spares are started. `on_change` writes them down."""
        if self.spares is not None:
            self.spares.on_change = on_change
            tasks.keep("spares", self.spares.run)
        elif self._launcher.factory.settings.spares:
            self._tell("Host: spares has no effect under a stock circusd, whose watchers cannot be renamed")

    def exited(self, name: str, pid: int, code: int | None) -> bool:
        """Called with every exit. False if it was no spare."""
        return self.spares is not None and self.spares.exited(name, pid, code)

    def records(self) -> dict[str, SpareEntry]:
        """For the statefile."""
        return {} if self.spares is None else self.spares.records()

    def status(self) -> dict[str, Any] | None:
        """For `dynamo status --json`; None where there are none."""
        return None if self.spares is None else self.spares.status()

    def counts(self) -> dict[tuple[str, str], int]:
        """How many there are, by engine and state."""
        return {} if self.spares is None else self.spares.counts()

    async def close(self) -> None:
        """End them."""
        if self.spares is not None:
            await self.spares.close()

    def _kind_of(self, name: str) -> Kind | None:
        worker = None if self._shell is None else self._shell.fleet.workers.get(name)
        return None if worker is None else self._kinds.of(self._launcher.factory.service(worker.component))

    def _calm(self) -> bool:
        return self._shell is None or not any(
            TRAITS[worker.state].comes_up and TRAITS[worker.state].runs for worker in self._shell.fleet.workers.values()
        )

    # --- control.effects.Observer ------------------------------------------------------------------

    def on_stimulus(self, stimulus: Stimulus) -> None:
        """Of no interest here."""

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Of no interest here."""

    def on_fleet(self, fleet: Fleet) -> None:
        """An apply may have changed what is wanted."""
        if self.spares is not None:
            self.spares.wake()
