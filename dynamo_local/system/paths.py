"""Paths of a namespace's files and sockets on this host. No other module decides them.

* The *runtime folder* holds sockets, locks, the embedded servers' data and the NATS token. The folder is private to the
  user (0700, owner checked): a process that can write to the control socket can run commands as the user.
* The *log folder* holds one file per process. The folder survives the run, for reading after a failure.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo_local.core.types import namespace_fault, watcher_name
from dynamo_local.errors import ConfigError, StateError
from dynamo_local.state.raw import home, make_private, prepare_folder, read_raw, statefile_path
from dynamo_local.system.host_errors import telling

IPC_PATH_MAX = 107
"""Longest path of a unix socket, bytes (`sun_path` of sockaddr_un, with its final zero)."""

REQUESTS_SOCKET = "req.sock"


def check_namespace(namespace: str) -> str:
    """The namespace, if it is fit for file names, watcher names and NATS subjects; else `ConfigError`."""
    fault = namespace_fault(namespace)
    if fault is not None:
        raise ConfigError(fault)
    return namespace


def private_folder(path: Path) -> Path:
    """Make `path` with mode 0700 or check that it is ours alone; refuse a link or another user's folder."""
    with telling("a folder of ours cannot be made"):
        make_private(path)
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{path} is not a plain folder; remove it or set XDG_RUNTIME_DIR")
    if info.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to uid {info.st_uid}, not to you (uid {os.getuid()}); set XDG_RUNTIME_DIR")
    if stat.S_IMODE(info.st_mode) & 0o077:
        with telling("a folder of ours cannot be made private"):
            path.chmod(0o700)
    return path


def runtime_root(env: Mapping[str, str]) -> Path:
    """`$XDG_RUNTIME_DIR/dynamo`, else one folder per uid under the temporary folder. Not created here.

    This is for a run that begins. The statefile of an earlier run names that run's folder: see `Paths.found`. logind's
    own folder does not do for a user who does not linger: logind removes it at the last logout, and the run goes on.
    """
    xdg = env.get("XDG_RUNTIME_DIR")
    if xdg and not goes_at_logout(Path(xdg), Path("/")):
        return Path(os.path.realpath(xdg)) / "dynamo"
    return Path(os.path.realpath(env.get("TMPDIR") or tempfile.gettempdir())) / f"dynamo-{os.getuid()}"


def goes_at_logout(folder: Path, root: Path) -> bool:
    """The folder is the one that logind made for us and will remove. `root` is the file system's, `/`."""
    if folder != root / "run" / "user" / str(os.getuid()) or not (root / "run" / "systemd" / "users").is_dir():
        return False
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return True
    return not (root / "var" / "lib" / "systemd" / "linger" / name).exists()


def log_root(env: Mapping[str, str]) -> Path:
    """`$DYN_LOCAL_LOG_DIR`, else `~/.dynamo/logs`."""
    configured = env.get("DYN_LOCAL_LOG_DIR")
    return Path(configured) if configured else home(env) / ".dynamo" / "logs"


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

    @classmethod
    def found(cls, namespace: str, env: Mapping[str, str]) -> Paths:
        """Where the namespace's run *is*: its statefile says so, whatever the variables of this shell.

        Without a statefile (or with a broken one) as `of`.
        """
        paths = cls.of(namespace, env)
        try:
            raw = read_raw(paths.statefile)
        except StateError:
            return paths
        return replace(paths, runtime=_runtime_of(raw, namespace) or paths.runtime, logs=_logs_of(raw) or paths.logs)

    @property
    def control_socket(self) -> Path:
        """The arbiter's, for commands."""
        return self.runtime / "ctl.sock"

    @property
    def events_socket(self) -> Path:
        """Where circus publishes its events."""
        return self.runtime / "pub.sock"

    @property
    def metrics_socket(self) -> Path:
        """The arbiter's `/metrics`, with `metrics-socket: true`."""
        return self.runtime / "metrics.sock"

    @property
    def planner_socket(self) -> Path:
        """The planner's control API. Its path is not longer than that of `control_socket`, whose length is checked."""
        return self.runtime / "api.sock"

    @property
    def page_socket(self) -> Path:
        """Where the page's process makes new links."""
        return self.runtime / "page.sock"

    @property
    def page_log(self) -> Path:
        """The log of the page's process that a run keeps."""
        return self.log_file(watcher_name(self.namespace, "dashboard"))

    @property
    def requests_socket(self) -> Path:
        """Where the page's process takes ended requests from Frontends."""
        return self.runtime / REQUESTS_SOCKET

    @property
    def circus_endpoint(self) -> str:
        """`control_socket`, as circus writes it."""
        return f"ipc://{self.control_socket}"

    @property
    def lock(self) -> Path:
        """Held by the arbiter for its whole life. Beside the statefile: whoever finds the one finds the other."""
        return self.statefile.with_suffix(".lock")

    @property
    def runtime_lock(self) -> Path:
        """Held as `lock` is: runs with statefiles in two folders, but one runtime folder, must not share their sockets.

        Earlier releases hold this one alone.
        """
        return self.runtime.parent / f"{self.namespace}.lock"

    @property
    def simulated_gpu_locks(self) -> Path:
        """Locks of `sim:8`'s devices: they are this namespace's alone. Real ones' are the host's
        (`system.gpu_locks`)."""
        return self.runtime / "gpus"

    def log_file(self, watcher: str) -> Path:
        """The log file of one process."""
        return self.logs / f"{watcher}.log"

    def worker_folder(self, watcher: str) -> Path:
        """Folder for sockets of processes that a worker starts. Their long names need a short folder.

        The worker makes the folder, and the end of the run removes it.
        """
        return self.runtime / "w" / watcher

    def prepare(self) -> None:
        """Create the folders, private; refuse a control socket whose path the kernel would cut."""
        length = len(os.fsencode(str(self.control_socket)))
        if length > IPC_PATH_MAX:
            raise ConfigError(
                f"the control socket's path {self.control_socket} has {length} bytes, the kernel allows "
                f"{IPC_PATH_MAX}; set XDG_RUNTIME_DIR to a shorter folder or use a shorter --namespace"
            )
        prepare_folder(self.statefile.parent)
        private_folder(self.runtime.parent)
        private_folder(self.runtime)
        private_folder(self.logs)


def _runtime_of(raw: Mapping[str, Any], namespace: str) -> Path | None:
    """The runtime folder that a statefile names, if it can be one of ours: it is removed with all that is in it."""
    folder = Path(str(raw.get("runtime_dir") or ""))
    is_ours = folder.name == namespace and folder.parent.name in ("dynamo", f"dynamo-{os.getuid()}")
    return folder if folder.is_absolute() and is_ours else None


def _logs_of(raw: Mapping[str, Any]) -> Path | None:
    """The log folder; earlier releases only wrote each worker's own file."""
    if isinstance(raw.get("log_dir"), str):
        return Path(raw["log_dir"])
    entries = raw.get("components")
    for entry in entries.values() if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("log_file"), str):
            return Path(entry["log_file"]).parent
    return None


def write_private(files: Mapping[Path, str]) -> None:
    """Write these files anew, 0600; a folder that is missing is made, 0700."""
    for path, text in files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
