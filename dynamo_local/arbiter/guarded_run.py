"""Describes a run for its guardian, in a small file that the arbiter writes before it starts the guardian.

The guardian also keeps the run's indispensable files: clearing the runtime folder must not end the run. A live arbiter
restores them itself (`arbiter.runtime_folder`). After its death nobody else knows the certificates and the token by
which the running etcd and NATS are reached.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dynamo_local.system.paths import Paths, write_private

OPTION = "guarded"
"""The plugin's one option: the path of a `GuardedRun`'s file. circus does not quote options on the command line."""


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """The arbiter that a guardian watches (started so many seconds after boot), and the run that it would leave.

    The guardian restores `files` if they disappear after the arbiter's death.
    """

    namespace: str
    run_id: str
    runtime: str
    statefile: str
    logs: str
    arbiter_pid: int
    arbiter_start_time: float
    keep: bool
    files: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> GuardedRun:
        """Read the file of `write`."""
        read = json.loads(path.read_text())
        return cls(**{**read, "files": tuple(read["files"])})

    @property
    def paths(self) -> Paths:
        """Where the files of its namespace are."""
        return Paths(self.namespace, Path(self.runtime), Path(self.statefile), Path(self.logs))


log = logging.getLogger(__name__)


class KeptFiles:
    """The contents of these files now. An unreadable file is not kept."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._texts: dict[Path, str] = {}
        for path in paths:
            try:
                self._texts[path] = path.read_text()
            except OSError as error:
                log.warning("%s is not kept: %s", path, error)

    def restore(self) -> list[Path]:
        """Write missing files again, private to the user. Returns their paths. Raises `OSError`."""
        missing = {path: text for path, text in self._texts.items() if not path.exists()}
        write_private(missing)
        return list(missing)
