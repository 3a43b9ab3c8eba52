"""Where things of a namespace live on this host. One place decides, everybody asks here.

* The *runtime folder* holds sockets, locks, the embedded servers' data and the NATS token: private to the
  user (0700, owner checked), because whoever can write the control socket can run commands as the user.
* The *log folder* holds one file per process and survives the run: it is what one reads after a failure.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.types import NAME
from dynamo_local.errors import ConfigError
from dynamo_local.state.raw import statefile_path

IPC_PATH_MAX = 107
"""Bytes that a unix socket's path may have (sockaddr_un, circus-facts)."""


def check_namespace(namespace: str) -> str:
    """The namespace, if it is fit for file names, watcher names and NATS subjects; else `ConfigError`."""
    if not NAME.fullmatch(namespace):
        raise ConfigError(f"namespace {namespace!r}: only letters, digits, '_' and '-' are allowed")
    return namespace


def private_folder(path: Path) -> Path:
    """Make `path` with mode 0700 or check that it is ours alone; refuse a link or a stranger's folder."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{path} is not a plain folder; remove it or set XDG_RUNTIME_DIR")
    if info.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to uid {info.st_uid}, not to you (uid {os.getuid()}); set XDG_RUNTIME_DIR")
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def runtime_root(env: Mapping[str, str]) -> Path:
    """`$XDG_RUNTIME_DIR/dynamo`, else one folder per uid under the temporary folder. Not created here."""
    xdg = env.get("XDG_RUNTIME_DIR")
    if xdg:
        return Path(xdg) / "dynamo"
    return Path(env.get("TMPDIR") or tempfile.gettempdir()) / f"dynamo-{os.getuid()}"


def log_root(env: Mapping[str, str]) -> Path:
    """`$DYN_LOCAL_LOG_DIR`, else `~/.dynamo/logs`."""
    configured = env.get("DYN_LOCAL_LOG_DIR")
    return Path(configured) if configured else Path(env.get("HOME") or Path.home()) / ".dynamo" / "logs"


@dataclass(frozen=True, slots=True)
class Paths:
    """All paths of one namespace. Nothing is created until `prepare`."""

    namespace: str
    runtime: Path
    statefile: Path
    logs: Path

    @classmethod
    def of(cls, namespace: str, env: Mapping[str, str]) -> Paths:
        """Paths for `namespace` under the folders that `env` names."""
        check_namespace(namespace)
        return cls(
            namespace=namespace,
            runtime=runtime_root(env) / namespace,
            statefile=statefile_path(namespace, env),
            logs=log_root(env) / namespace,
        )

    @property
    def control_socket(self) -> Path:
        return self.runtime / "ctl.sock"

    @property
    def events_socket(self) -> Path:
        return self.runtime / "pub.sock"

    @property
    def circus_endpoint(self) -> str:
        return f"ipc://{self.control_socket}"

    @property
    def lock(self) -> Path:
        """Held by the arbiter for its whole life; its text says who it is."""
        return self.runtime.parent / f"{self.namespace}.lock"

    @property
    def boot_report(self) -> Path:
        """JSON lines by which a detached arbiter tells its parent how the start goes."""
        return self.runtime / "boot.jsonl"

    def log_file(self, watcher: str) -> Path:
        return self.logs / f"{watcher}.log"

    def worker_folder(self, watcher: str) -> Path:
        """For sockets of what the worker starts; made by the worker, gone with the run. Short: they have long names."""
        return self.runtime / "w" / watcher

    def prepare(self) -> None:
        """Create the folders, private; refuse a control socket whose path the kernel would cut."""
        length = len(os.fsencode(str(self.control_socket)))
        if length > IPC_PATH_MAX:
            raise ConfigError(
                f"the control socket's path {self.control_socket} has {length} bytes, the kernel allows "
                f"{IPC_PATH_MAX}; set XDG_RUNTIME_DIR to a shorter folder or use a shorter --namespace"
            )
        private_folder(self.runtime.parent)
        private_folder(self.runtime)
        private_folder(self.logs)
