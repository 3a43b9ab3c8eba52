"""Packs what a maintainer needs: versions, configuration, statefile, last logs and events, without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.doctor.software import Packages
from dynamo_local.core.secrets import allowed_env, mask_config, mask_env, mask_log, secret_values
from dynamo_local.core.types import Missing
from dynamo_local.errors import BadInput, StateError
from dynamo_local.state.raw import read_raw
from dynamo_local.system.host_errors import telling
from dynamo_local.system.log_files import last_lines
from dynamo_local.system.paths import Paths

LOG_LINES = 2000
RECORD_LINES = 500
RECORDS = ("events.jsonl", "decisions.jsonl")
"""Not `ticks.jsonl`: what requests of which lengths came when is the user's own."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file of the archive."""

    name: str
    what: str
    text: str

    @property
    def data(self) -> bytes:
        return self.text.encode("utf-8", "replace")


def contents(
    report: Mapping[str, Any], packages: Packages | Missing, namespaces: Sequence[Paths], env: Mapping[str, str]
) -> list[Member]:
    """The files of the archive, secrets taken out."""
    secrets = secret_values(env)
    versions = {} if isinstance(packages, Missing) else packages.versions
    members = [
        Member("doctor.json", "what the checks found", json.dumps(report, indent=2)),
        Member("versions.txt", "installed packages", _lines(f"{name}=={each}" for name, each in versions.items())),
        Member(
            "environment.txt",
            "variables that a worker would get, secrets masked",
            _lines(f"{name}={value}" for name, value in sorted(mask_env(allowed_env(env)).items())),
        ),
    ]
    for paths in namespaces:
        members += _of_namespace(paths)
    return [Member(each.name, each.what, mask_log(each.text, secrets)) for each in members]


def _of_namespace(paths: Paths) -> Iterator[Member]:
    with contextlib.suppress(StateError):
        state = mask_config(read_raw(paths.statefile))
        what = "statefile with the configuration, secrets masked"
        yield Member(f"{paths.namespace}/state.json", what, json.dumps(state, indent=2))
    for path in sorted(paths.logs.glob("*.log")):
        text = _lines(last_lines(path, LOG_LINES))
        yield Member(f"{paths.namespace}/logs/{path.name}", f"last {LOG_LINES} lines", text)
    for name in RECORDS:
        lines = last_lines(paths.logs / name, RECORD_LINES)
        if lines:
            yield Member(f"{paths.namespace}/{name}", f"last {RECORD_LINES} records", _lines(map(_masked, lines)))


def _masked(line: str) -> str:
    try:
        return json.dumps(mask_config(json.loads(line)))
    except ValueError:
        return line


def _lines(lines: Any) -> str:
    return "".join(f"{line}\n" for line in lines)


def write(path: Path, members: Sequence[Member]) -> int:
    """Write the archive anew, for this user alone. Returns its bytes. Raises `BadInput` for a file that is there."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member in members:
            info = tarfile.TarInfo(f"dynamo-doctor/{member.name}")
            info.size, info.mode = len(member.data), 0o600
            archive.addfile(info, io.BytesIO(member.data))
    with telling(f"the archive {path} cannot be written"):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise BadInput(f"{path} is there already; name another file") from None
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise BadInput(f"the archive {path} cannot be written: {error.strerror}; name another file") from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(packed.getvalue())
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return len(packed.getvalue())
