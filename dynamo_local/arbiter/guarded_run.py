"""What a guardian is told of the run that it watches: a small file, which the arbiter writes before it starts one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dynamo_local.system.paths import Paths, write_private

OPTION = "guarded"
"""The plugin's one option: the path of a `GuardedRun`'s file (circus does not quote options on the command line)."""


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """What a guardian watches: an arbiter (started so many seconds after boot), and what it would leave behind.

    `files` are those that the guardian writes again if they go with the arbiter.
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
        """Write it for the guardian to read; the file appears whole or not at all."""
        temporary = path.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> GuardedRun:
        """What `write` wrote."""
        read = json.loads(path.read_text())
        return cls(**{**read, "files": tuple(read["files"])})

    @property
    def paths(self) -> Paths:
        """Where the files of its namespace are."""
        return Paths(self.namespace, Path(self.runtime), Path(self.statefile), Path(self.logs))


# --- kept_files
# The files that a run cannot do without, kept by its guardian: who clears the runtime folder must not end the run.
#
# A live arbiter writes them again itself (`arbiter.runtime_folder`). With the arbiter gone nobody else knows what was
# in
# them: the certificates and the token with which the running etcd and NATS are reached are written nowhere else.

log = logging.getLogger(__name__)


class KeptFiles:
    """What is in these files now; one that cannot be read is not kept."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._texts: dict[Path, str] = {}
        for path in paths:
            try:
                self._texts[path] = path.read_text()
            except OSError as error:
                log.warning("%s is not kept: %s", path, error)

    def restore(self) -> list[Path]:
        """Write what is missing again, private to the user; returns what was. Raises `OSError`."""
        missing = {path: text for path, text in self._texts.items() if not path.exists()}
        write_private(missing)
        return list(missing)
