"""The embedded etcd and NATS of a run: the first watchers to start and the last to end.

They are started again when they die (with their data and on their port), because without them no worker can
be found: the registry heals by itself once they are back. Nobody else would start them, so it is tried
for ever, with a growing delay, also if a start itself fails (no memory, no descriptors, a full disk). `status` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import shutil
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dynamo_local.clock import Clock
from dynamo_local.core.exit_codes import how_it_ended
from dynamo_local.core.types import watcher_name
from dynamo_local.infra import certificates
from dynamo_local.infra.binaries import find_server
from dynamo_local.infra.certificates import Certificates
from dynamo_local.infra.port_lease import PortLease
from dynamo_local.infra.specs import EtcdSpec, NatsSpec, prepare, write_private
from dynamo_local.state import ServerEntry
from dynamo_local.system.logs.files import set_aside
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import ProcessHost, ProcessSpec
from dynamo_local.system.processes import aend_session, start_time_s, wait_exit

log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
RESTART_DELAY_MAX_S = 10.0
"""The delay doubles with each failure up to this. The actual wait is drawn from the delay's upper half, so that servers
of several graphs that were killed together do not all start together."""
RAN_WELL_S = 30.0
"""After a server has run this long, its failures are forgotten and the delay is the shortest again."""
STOP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Server:
    """One server of this run. Times are of the arbiter's monotonic clock."""

    spec: EtcdSpec | NatsSpec
    pid: int | None = None
    started_s: float = 0.0
    failures: int = 0
    """Exits and failed starts since it last ran well."""
    next_try_s: float | None = None
    reason: str | None = None
    """The reason of the latest failure, in words."""
    restarting: asyncio.Task[None] | None = None

    def ran_well(self, now_s: float) -> bool:
        return now_s - self.started_s > RAN_WELL_S


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A server was started, has died, or could not be started: `ServerStarted`, `ServerDied`, `ServerNotStarted`.

    `next_try_s` is when it is started again, in seconds from then.
    """

    watcher_name: str
    kind: Literal["etcd", "nats"]
    event: str
    before: str
    after: str
    cause: str
    pid: int | None = None
    reason: str | None = None
    next_try_s: float | None = None


class EmbeddedServers:
    """Starts, watches and ends the servers that the user did not point us at.

    `unit` gives random numbers in [0, 1) for the delays' jitter.
    """

    def __init__(
        self,
        host: ProcessHost,
        paths: Paths,
        clock: Clock,
        marks: Callable[[str], Mapping[str, str]],
        *,
        unit: Callable[[], float] = random.random,
    ) -> None:
        self._host = host
        self._marks = marks
        self.on_change: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.on_event: Callable[[ServerEvent], None] = lambda event: None
        self._paths = paths
        self._clock = clock
        self._unit = unit
        self._ports: list[PortLease] = []
        self._servers: dict[str, _Server] = {}
        self._leaving = False
        self.origins: list[str] = []
        self.certificates: Certificates | None = None
        self._certificate_files: dict[Path, str] = {}

    @property
    def names(self) -> list[str]:
        """Watcher names of those that we run."""
        return list(self._servers)

    async def start_etcd(self) -> tuple[str, EtcdSpec]:
        """Prepare an etcd, with certificates of this run; returns its watcher's name and spec. `spawn` starts it."""
        binary = find_server("etcd", search_path=os.environ.get("PATH"))
        spec = EtcdSpec(binary, self._fresh("etcd"), self._port(), self._port(), await self._certificates())
        self.origins.append(binary.describe())
        return self._add("etcd", spec), spec

    async def start_nats(self) -> tuple[str, NatsSpec]:
        """Prepare a NATS with certificates and a token of this run; returns its watcher's name and spec."""
        binary = find_server("nats-server", search_path=os.environ.get("PATH"))
        token = secrets.token_hex(24)
        spec = NatsSpec(binary, self._fresh("nats"), self._port(), token, await self._certificates())
        self.origins.append(binary.describe())
        return self._add("nats", spec), spec

    async def _certificates(self) -> Certificates:
        """Made once for both servers."""
        if self.certificates is None:
            self.certificates = await asyncio.to_thread(certificates.make, self._fresh("certificates"))
            self._certificate_files = await asyncio.to_thread(self.certificates.texts)
        return self.certificates

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
        self._servers[name] = _Server(spec)
        return name

    async def spawn(self, name: str) -> int:
        """Start (or start again) one server; returns its pid. OSError says why it could not be started."""
        server = self._servers[name]
        server.started_s = self._clock.now_s()
        pid = server.pid = await self._host.start_process(self.process_spec(name, server.spec))
        before = "restarting" if server.failures else "pending"
        self.on_event(ServerEvent(name, _kind(server.spec), "ServerStarted", before, "running", "serve", pid))
        if self.on_change is not None:
            await self.on_change()
        return pid

    def process_spec(self, name: str, spec: EtcdSpec | NatsSpec) -> ProcessSpec:
        """How it is run. No parent-death signal: it must end after the workers, even if the arbiter dies first."""
        return ProcessSpec(
            name,
            spec.argv,
            env={**spec.env, **self._marks(name)},
            cwd=str(self._paths.runtime),
            log_file=self._paths.log_file(name),
            graceful_timeout_s=STOP_TIMEOUT_S,
        )

    @property
    def files(self) -> list[Path]:
        """What workers, and the servers when they are started again, read: configuration, tokens and certificates."""
        of_servers = [path for server in self._servers.values() for path in server.spec.files]
        return [*self._certificate_files, *of_servers]

    def restore_files(self) -> None:
        """Write again what somebody has removed. Blocks. A server's data comes back with its restart, empty."""
        write_private({path: text for path, text in self._certificate_files.items() if not path.exists()})
        for server in self._servers.values():
            if not all(path.exists() for path in (*server.spec.folders, *server.spec.files)):
                prepare(server.spec)

    def adopt(self, name: str, spec: EtcdSpec | NatsSpec, pid: int | None) -> None:
        """Take over one that a killed arbiter started; without a pid it is started again, with its data."""
        self._servers[name] = _Server(spec, pid, self._clock.now_s())
        if spec.certificates is not None and not self._certificate_files:
            with contextlib.suppress(OSError):  # removed while nobody watched: the servers that run have read them
                self._certificate_files = spec.certificates.texts()
        if pid is None:
            self.exited(name, None)

    def records(self) -> dict[str, ServerEntry]:
        """For the statefile."""
        return {name: _record(server) for name, server in self._servers.items()}

    def status(self) -> list[dict[str, Any]]:
        """One plain dict for each server, for `dynamo status --json`.

        `state` is `running`, or `restarting` with `next_try_s` seconds until the next try; `failures` counts the
        failures since it last ran well, and `reason` is that of the latest.
        """
        now_s = self._clock.now_s()
        return [_status(name, server, now_s) for name, server in self._servers.items()]

    def exited(self, name: str, code: int | None) -> bool:
        """Called with every exit. False if it is none of ours; a server that dies unasked is started again."""
        server = self._servers.get(name)
        if server is None:
            return False
        pid, server.pid = server.pid, None
        if not self._leaving:
            if server.ran_well(self._clock.now_s()):
                server.failures = 0
            self._failed(name, server, "ServerDied", how_it_ended(code), pid)
            if server.restarting is None:
                server.restarting = asyncio.ensure_future(self._restart(name, server))
        return True

    def _failed(self, name: str, server: _Server, event: str, reason: str, pid: int | None = None) -> None:
        bound_s = min(RESTART_DELAY_S * 2.0 ** min(server.failures, 30), RESTART_DELAY_MAX_S)
        delay_s = bound_s * (0.5 + self._unit() / 2)
        server.failures += 1
        server.reason = reason
        server.next_try_s = self._clock.now_s() + delay_s
        log.warning("%s %s (failure %d); starting it again in %.1f s", name, reason, server.failures, delay_s)
        before = "running" if event == "ServerDied" else "restarting"
        cause = "serve" if pid is None else f"exit:{pid}"
        kind, again_s = _kind(server.spec), round(delay_s, 3)
        self.on_event(ServerEvent(name, kind, event, before, "restarting", cause, pid, reason, again_s))

    async def _restart(self, name: str, server: _Server) -> None:
        """Try until it runs. If it exits while its start is recorded, `exited` has set the time of the next try."""
        while (next_try_s := server.next_try_s) is not None:
            await self._clock.sleep_until(next_try_s)
            server.next_try_s = None
            try:
                await self.spawn(name)
            except Exception as error:  # whatever it is, nobody else would try again
                if server.pid is None:
                    self._failed(name, server, "ServerNotStarted", f"could not be started: {error}")
                else:
                    log.error("%s runs again, but its new pid could not be recorded: %s", name, error)
        server.restarting = None

    async def stop(self) -> None:
        """End NATS, then etcd, each by SIGTERM and then SIGKILL; remove their data."""
        self._leaving = True
        restarting = [server.restarting for server in self._servers.values() if server.restarting is not None]
        for task in restarting:
            task.cancel()
        await asyncio.gather(*restarting, return_exceptions=True)
        for name in reversed(self._servers):
            await self._end(name)
        for port in self._ports:
            port.close()
        for kind in ("etcd", "nats", "certificates"):
            shutil.rmtree(self._paths.runtime / kind, ignore_errors=True)

    async def _end(self, name: str) -> None:
        pid = self._servers[name].pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            if not await wait_exit(pid, STOP_TIMEOUT_S):
                log.warning("%s (pid %d) ignored SIGTERM for %.0f s; killing it", name, pid, STOP_TIMEOUT_S)
            await aend_session(pid)
            await wait_exit(pid, STOP_TIMEOUT_S)
            await asyncio.sleep(0)  # let the host's own exit callback reap it
        await self._host.forget(name)


def _record(server: _Server) -> ServerEntry:
    spec = server.spec
    return ServerEntry(
        kind=_kind(spec),
        binary=str(spec.binary.path),
        ports=[spec.client_port, spec.peer_port] if isinstance(spec, EtcdSpec) else [spec.port],
        pid=server.pid,
        pid_start_time=None if server.pid is None else start_time_s(server.pid),
    )


def _status(name: str, server: _Server, now_s: float) -> dict[str, Any]:
    wait_s = None if server.next_try_s is None else round(max(0.0, server.next_try_s - now_s), 3)
    return {
        "watcher_name": name,
        "kind": _kind(server.spec),
        "state": "running" if server.pid is not None else "restarting",
        "pid": server.pid,
        "failures": 0 if server.pid is not None and server.ran_well(now_s) else server.failures,
        "next_try_s": wait_s,
        "reason": server.reason,
    }


def _kind(spec: EtcdSpec | NatsSpec) -> Literal["etcd", "nats"]:
    return "etcd" if isinstance(spec, EtcdSpec) else "nats"
