"""The embedded etcd and NATS of a run: the first watchers to start and the last to end.

They are started again when they die (with their data and on their port), because without them no worker can
be found: the registry heals by itself once they are back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.types import watcher_name
from dynamo_local.serve.host import ProcessHost, ProcessSpec
from dynamo_local.serve.infra import EtcdSpec, NatsSpec, PortLease, find_server, prepare
from dynamo_local.serve.logs import set_aside
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.processes import kill_session, start_time_s, wait_exit
from dynamo_local.state import ServerEntry

log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
RESTART_DELAY_MAX_S = 10.0
RAN_WELL_S = 30.0
STOP_TIMEOUT_S = 5.0


class EmbeddedServers:
    """Starts, watches and ends the servers that the user did not point us at."""

    def __init__(
        self, host: ProcessHost, paths: Paths, clock: Clock, marks: Callable[[str], Mapping[str, str]]
    ) -> None:
        self._host = host
        self._marks = marks
        self.on_change: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._pids: dict[str, int] = {}
        self._paths = paths
        self._clock = clock
        self._ports: list[PortLease] = []
        self._specs: dict[str, EtcdSpec | NatsSpec] = {}
        self._started_s: dict[str, float] = {}
        self._delays_s: dict[str, float] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._leaving = False
        self.origins: list[str] = []

    @property
    def names(self) -> list[str]:
        return list(self._specs)

    def start_etcd(self) -> tuple[str, EtcdSpec]:
        """Prepare an etcd; returns its watcher's name and spec. `spawn` starts it."""
        binary = find_server("etcd", search_path=os.environ.get("PATH"))
        spec = EtcdSpec(binary, self._fresh("etcd"), self._port(), self._port())
        self.origins.append(binary.describe())
        return self._add("etcd", spec), spec

    def start_nats(self) -> tuple[str, NatsSpec]:
        """Prepare a NATS with a token of this run; returns its watcher's name and spec."""
        binary = find_server("nats-server", search_path=os.environ.get("PATH"))
        spec = NatsSpec(binary, self._fresh("nats"), self._port(), secrets.token_hex(24))
        self.origins.append(binary.describe())
        return self._add("nats", spec), spec

    def _fresh(self, name: str) -> Path:
        folder = self._paths.runtime / name
        shutil.rmtree(folder, ignore_errors=True)  # a killed run's registry must not come back to life
        return folder

    def _port(self) -> int:
        lease = PortLease()
        self._ports.append(lease)
        return lease.port

    def _add(self, kind: str, spec: EtcdSpec | NatsSpec) -> str:
        prepare(spec)
        set_aside(self._paths.log_file(watcher_name(self._paths.namespace, kind)))
        name = watcher_name(self._paths.namespace, kind)
        self._specs[name] = spec
        return name

    async def spawn(self, name: str) -> int:
        """Start (or start again) one server; returns its pid."""
        self._started_s[name] = self._clock.now_s()
        spec = self._specs[name]
        self._pids[name] = await self._host.start_process(self.process_spec(name, spec))
        if self.on_change is not None:
            await self.on_change()
        return self._pids[name]

    def process_spec(self, name: str, spec: EtcdSpec | NatsSpec) -> ProcessSpec:
        """How it is run. No parent-death signal: it ends after the workers, whoever ends them (the guardian, too)."""
        return ProcessSpec(
            name,
            spec.argv,
            env={**spec.env, **self._marks(name)},
            cwd=str(self._paths.runtime),
            log_file=self._paths.log_file(name),
            graceful_timeout_s=STOP_TIMEOUT_S,
        )

    def adopt(self, name: str, spec: EtcdSpec | NatsSpec, pid: int | None) -> None:
        """Take over one that a killed arbiter started; without a pid it is started again, with its data."""
        self._specs[name] = spec
        self._started_s[name] = self._clock.now_s()
        if pid is not None:
            self._pids[name] = pid
        else:
            self.exited(name, None)

    def records(self) -> dict[str, ServerEntry]:
        """For the statefile."""
        return {name: self._record(name, spec) for name, spec in self._specs.items()}

    def _record(self, name: str, spec: EtcdSpec | NatsSpec) -> ServerEntry:
        pid = self._pids.get(name)
        return ServerEntry(
            kind="etcd" if isinstance(spec, EtcdSpec) else "nats",
            binary=str(spec.binary.path),
            ports=[spec.client_port, spec.peer_port] if isinstance(spec, EtcdSpec) else [spec.port],
            pid=pid,
            pid_start_time=None if pid is None else start_time_s(pid),
        )

    def exited(self, name: str, code: int | None) -> bool:
        """Told of every exit. False if it is none of ours; a server that dies unasked is started again."""
        if name not in self._specs:
            return False
        self._pids.pop(name, None)
        if not self._leaving:
            ran_s = self._clock.now_s() - self._started_s[name]
            delay_s = RESTART_DELAY_S if ran_s > RAN_WELL_S else self._delays_s.get(name, RESTART_DELAY_S)
            self._delays_s[name] = min(delay_s * 2, RESTART_DELAY_MAX_S)
            log.warning(
                "%s ended with exit code %s after %.1f s; starting it again in %.1f s", name, code, ran_s, delay_s
            )
            task = asyncio.ensure_future(self._restart(name, delay_s))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)
        return True

    async def _restart(self, name: str, delay_s: float) -> None:
        await self._clock.sleep_until(self._clock.now_s() + delay_s)
        try:
            await self.spawn(name)
        except OSError as error:
            log.error("%s cannot be started again: %s", name, error)

    async def stop(self) -> None:
        """End NATS, then etcd, each politely and then surely; remove their data."""
        self._leaving = True
        for task in list(self._restarts):
            task.cancel()
        for name in reversed(self._specs):
            await self._end(name)
        for port in self._ports:
            port.close()
        for kind in ("etcd", "nats"):
            shutil.rmtree(self._paths.runtime / kind, ignore_errors=True)

    async def _end(self, name: str) -> None:
        pid = self._pids.get(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            if not await wait_exit(pid, STOP_TIMEOUT_S):
                log.warning("%s (pid %d) ignored SIGTERM for %.0f s; killing it", name, pid, STOP_TIMEOUT_S)
            kill_session(pid)
            await wait_exit(pid, STOP_TIMEOUT_S)
            await asyncio.sleep(0)  # let the host's own exit callback reap it
        await self._host.forget(name)
