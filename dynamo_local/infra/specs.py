"""With which arguments, environment, folders and files the embedded etcd and NATS are run.

Nothing here starts a process: the arbiter runs what `EtcdSpec` and `NatsSpec` describe as its first watchers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.errors import ConfigError
from dynamo_local.infra.binaries import ServerBinary
from dynamo_local.infra.certificates import Certificates
from dynamo_local.infra.port_lease import LOOPBACK

NATS_MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""A prefill entry carries its prompt's token ids: 1 MiB, the server's default, ends near 200,000 tokens."""
TLS_TIMEOUT_S = 10
"""For a handshake; the default is two seconds, which thirty processes that start at once on two cores may need."""
_SAFE_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")


@dataclass(frozen=True, slots=True)
class EtcdSpec:
    """An etcd of one member on loopback. It answers only who shows the certificate of `certificates`.

    On both ports: who reaches the peer port can write what he likes. Those files must be there before it starts.
    Without `certificates` it speaks no TLS, and is open to every local user: for tests, and runs of older versions.
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
        """The whole environment: etcd takes any ETCD_* variable for a flag, so it is given none."""
        return {"PATH": os.defpath}

    @property
    def files(self) -> dict[Path, str]:
        """What is written before it starts, by path: for a shell, `. etcd.env` and then `etcdctl`."""
        tls = self.certificates
        if tls is None:
            return {}
        etcdctl = {"ETCDCTL_CACERT": tls.authority, "ETCDCTL_CERT": tls.certificate, "ETCDCTL_KEY": tls.key}
        lines = [
            f"export ETCD_ENDPOINTS={self.endpoint} ETCDCTL_ENDPOINTS={self.endpoint}",
            *(f"export {name}={shlex.quote(str(path))}" for name, path in etcdctl.items()),
            # Dynamo's processes take PEM itself; ours take either.
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

    With `certificates` it demands theirs, too, and shows its own: a client never tells the token to somebody who took
    the port while the server was down. Without, it speaks no TLS: for tests, and runs of older versions.
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
        """`tls://127.0.0.1:<port>`, as NATS_SERVER has it; without the token."""
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
        """Holds the token, so it is readable by the owner alone."""
        return self.folder / "nats.conf"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line; the token is in the file, not on it."""
        return (str(self.binary.path), "--config", str(self.config_file))

    @property
    def env(self) -> dict[str, str]:
        """The server's whole environment."""
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


def write_private(files: Mapping[Path, str]) -> None:
    """Write these files anew, 0600; a folder that is missing is made, 0700."""
    for path, text in files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
