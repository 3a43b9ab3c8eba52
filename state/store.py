"""The locked store: one lock across read, validate, change, validate, and an atomic, durable replace.

Everything here blocks (a commit is two fsyncs, some 12 ms): on an event loop use `aupdate`, or `asyncio.to_thread`.
A reader needs no lock: the file is only ever replaced whole.
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import ValidationError

from dynamo_local.core.secrets import mask_config
from dynamo_local.errors import StateError
from dynamo_local.state.raw import StateMissing, parse, prepare_folder, read_text
from dynamo_local.state.schema import SCHEMA_VERSION, State

# --- migrations
# From older schemas to the current one, a step at a time. A step takes and returns plain dictionaries.
#
# Version 0 is the predecessor's file (Dynamo 0.1-0.3), which had no `schema_version`. It is read for one purpose:
# tools and people that still have one get an answer instead of a stack trace.

NOBODY = "0" * 26
"""The run id given to a file without one: it sorts before every real one, and no run owns it."""


def migrate(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` in the current schema. Raises `StateError` for a version that is unknown or not a number."""
    version = raw.get("schema_version", 0)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise StateError(f"{path}: schema_version: {version!r} is no version number", path=str(path))
    if version > SCHEMA_VERSION:
        raise StateError(
            f"{path}: schema_version: {version} is newer than {SCHEMA_VERSION}, the newest that this version of "
            "dynamo-local knows; use the version that wrote it",
            path=str(path),
        )
    current = dict(raw)
    while version < SCHEMA_VERSION:
        current = MIGRATIONS[version](path, current)
        version += 1
    return current


def _from_predecessor(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    components = raw.get("components")
    if not isinstance(components, dict):
        raise StateError(f"{path}: components: missing, so this is no statefile", path=str(path))
    namespace = str(raw.get("namespace") or path.stem)
    environment = raw.get("environment")
    named = environment if isinstance(environment, dict) else {}
    return {
        "schema_version": 1,
        "namespace": namespace,
        "run_id": NOBODY,
        "circus_endpoint": raw.get("circus_endpoint"),
        "components": {name: _old_entry(path, namespace, name, entry) for name, entry in components.items()},
        # Its file held the manager's whole environment, tokens included: keep the two named ones.
        "environment": _old_environment(named),
    }


def _old_entry(path: Path, namespace: str, name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise StateError(f"{path}: components.{name}: an object is needed", path=str(path))
    resources = entry.get("resources") or {}
    gpus = [str(gpu) for gpu in resources.get("allocated_gpus") or []]
    lease = entry.get("lease")
    migrated = {
        "watcher_name": str(entry.get("watcher_name") or name),
        "component": re.sub(r"_\d+$", "", name.removeprefix(f"{namespace}_")),
        "cwd": str(entry.get("cwd") or ""),
        "cmd": str(entry.get("cmd") or ""),
        "resources": {"allocated_gpus": gpus} if gpus else {},
        "gpus_per_worker": len(gpus),
        # It recorded no state: a worker with a lease was serving.
        "state": "ready" if lease else "exited",
    }
    if lease:
        migrated["lease"] = f"{lease:x}" if isinstance(lease, int) else str(lease)
    return migrated


def _old_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    config = environment.get("DYNAMO_SERVICE_CONFIG")
    if isinstance(config, str):
        try:
            kept["DYNAMO_SERVICE_CONFIG"] = json.dumps(mask_config(json.loads(config)))
        except ValueError:
            kept["DYNAMO_SERVICE_CONFIG"] = "{}"
    resources = environment.get("SYSTEM_RESOURCES")
    if isinstance(resources, dict):
        info = [str(gpu) for gpu in resources.get("gpu_info") or []]
        kept["SYSTEM_RESOURCES"] = {"total_gpus": int(resources.get("total_gpus") or len(info)), "gpu_info": info}
    return kept


MIGRATIONS: Mapping[int, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {0: _from_predecessor}

T = TypeVar("T")

LOCK_TIMEOUT_S = 10.0
"""64 workers that register at once commit within about a second; past this somebody is stuck."""
_LOCK_POLL_S = (0.001, 0.064)
"""The first and the longest pause between two looks at the lock. At one look per ms, 64 waiting processes would keep
two cores busy, and the one that holds the lock would not get on."""
_ERRORS_SHOWN = 3


class Removal(enum.StrEnum):
    """The outcome of `remove_if_owned`."""

    REMOVED = "removed"
    NOT_OURS = "not_ours"
    ABSENT = "absent"


def load(path: Path) -> State:
    """The validated state, migrated if it is older. Takes no lock.

    Raises `StateMissing`, or `StateError` naming the file and the field.
    """
    return validated(path, read_text(path))


class StateStore:
    """One namespace's statefile.

    With `run_id`, transactions are refused once the file belongs to another run: a worker that outlived its
    arbiter must not write into its successor's file. One instance may be shared by threads.
    """

    def __init__(self, path: Path, *, run_id: str | None = None, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.path = path
        self._run_id = run_id
        self._lock_timeout_s = lock_timeout_s
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._threads = threading.Lock()  # threads of one process queue here instead of polling the file lock

    def read(self) -> State:
        return load(self.path)

    def stamp(self) -> object:
        """Equal to an earlier one while nobody has replaced, edited or removed the file. Takes no lock."""
        try:
            info = self.path.stat()
        except OSError:
            return None
        return info.st_ino, info.st_size, info.st_mtime_ns

    def create(self, state: State) -> None:
        """Write a new file. Raises `StateError` if there is one, whoever's it is, readable or not."""
        with self._locked():
            if self.path.exists():
                raise StateError(
                    f"{self.path} exists already; another run owns it, or left it behind (`dynamo down` cleans up)",
                    path=str(self.path),
                )
            self._write(dump(self.path, state))

    def rewrite(self, state: State) -> Path | None:
        """The owner's own view, whatever the file holds now. For the running arbiter alone, never for a worker.

        A broken file is first set aside; returns where to, or None if it was sound or absent.
        """
        with self._locked():
            text = dump(self.path, state)
            aside = self._set_aside_if_broken()
            self._write(text)
            return aside

    def set_aside_if_broken(self) -> Path | None:
        """Rename a broken file to `.corrupt-<time>` beside it. Returns the new path, None if it is sound or absent."""
        with self._locked():
            return self._set_aside_if_broken()

    @contextmanager
    def transaction(self) -> Iterator[State]:
        """Change the state: `with store.transaction() as state: state.components[name].lease = lease`.

        Commits when the block ends; if it raises, nothing is written; if nothing changed, nothing is written.
        Not reentrant. Raises `StateMissing`. Raises `StateError` if the lock is not had in time, if the file is broken
        or belongs to another run, or if the disk is full. It also does if the result would be invalid.
        """
        with self._locked():
            before = read_text(self.path)
            state = validated(self.path, before)
            if self._run_id is not None and state.run_id != self._run_id:
                raise StateError(
                    f"{self.path} belongs to run {state.run_id}, not to ours ({self._run_id}); left alone",
                    path=str(self.path),
                )
            yield state
            after = dump(self.path, state)
            if after != before:
                self._write(after)

    def update(self, change: Callable[[State], T]) -> T:
        """`change(state)` inside one transaction; returns what it returns."""
        with self.transaction() as state:
            return change(state)

    async def aupdate(self, change: Callable[[State], T]) -> T:
        """`update` in a thread. A cancelled caller does not undo it: the commit may still happen."""
        return await asyncio.to_thread(self.update, change)

    def remove_if_owned(self, run_id: str) -> Removal:
        """Remove this one file, and only while it is that run's. A broken file is nobody's."""
        with self._locked():
            try:
                owner = load(self.path).run_id
            except StateMissing:
                return Removal.ABSENT
            except StateError:
                return Removal.NOT_OURS
            if owner != run_id:
                return Removal.NOT_OURS
            self.path.unlink()
            self._temporary.unlink(missing_ok=True)
            _fsync_folder(self.path.parent)
            return Removal.REMOVED

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline_s = time.monotonic() + self._lock_timeout_s
        if not self._threads.acquire(timeout=self._lock_timeout_s):
            raise self._busy()
        try:
            prepare_folder(self.path.parent)
            # A new object each time: filelock counts re-entries per object, and would let a nested one through.
            lock = FileLock(self._lock_path, mode=0o600)
            try:
                self._acquire(lock, deadline_s)
            except OSError as error:
                raise StateError(f"{self._lock_path} cannot be locked: {error.strerror}") from error
            try:
                yield
            finally:
                lock.release()
        finally:
            self._threads.release()

    def _acquire(self, lock: FileLock, deadline_s: float) -> None:
        """Raises `StateError` past the deadline."""
        pause_s, longest_s = _LOCK_POLL_S
        while True:
            try:
                lock.acquire(blocking=False)
                return
            except Timeout:
                if time.monotonic() >= deadline_s:
                    raise self._busy() from None
            # At random, so that those who came together do not look together.
            time.sleep(min(random.uniform(pause_s / 2, pause_s), max(0.0, deadline_s - time.monotonic())))
            pause_s = min(2 * pause_s, longest_s)

    def _busy(self) -> StateError:
        return StateError(
            f"{self.path} was locked by another process for {self._lock_timeout_s:g} s "
            f"(`fuser {self._lock_path}` names it); nothing was changed",
            path=str(self.path),
        )

    def _set_aside_if_broken(self) -> Path | None:
        try:
            load(self.path)
        except StateMissing:
            return None
        except StateError as error:
            if isinstance(error.__cause__, OSError):
                raise  # it cannot be read now (for example without free descriptors), but is not broken
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            aside, n = self.path.with_name(f"{self.path.name}.corrupt-{stamp}"), 1
            while aside.exists():
                aside, n = self.path.with_name(f"{self.path.name}.corrupt-{stamp}-{n}"), n + 1
            self.path.rename(aside)
            _fsync_folder(self.path.parent)
            return aside
        return None

    def _write(self, text: str) -> None:
        # One fixed temporary name, safe under the lock: what a crash leaves is overwritten by the next commit.
        try:
            _write_durably(self._temporary, text.encode())
            self._temporary.replace(self.path)
            _fsync_folder(self.path.parent)
        except OSError as error:
            raise StateError(
                f"{self.path} cannot be written: {error.strerror}; the previous version is kept", path=str(self.path)
            ) from error


def validated(path: Path, text: str) -> State:
    """The state that the text says, of this schema or an older one. Raises `StateError` that names the field."""
    raw = parse(path, text)
    version = raw.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:  # `True` equals 1, and is no version
        text = json.dumps(migrate(path, raw))
    try:
        return State.model_validate_json(text)
    except ValidationError as error:
        raise _explained(path, error) from None


def dump(path: Path, state: State) -> str:
    """The text to write, validated as it would be read. `warnings=False`: the validation's errors are clearer."""
    text = state.model_dump_json(indent=2, warnings=False) + "\n"
    validated(path, text)
    return text


def _explained(path: Path, error: ValidationError) -> StateError:
    """One line with file, field and cause. Values are left out: a wrong one may be a secret."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    lines = []
    for item in found[:_ERRORS_SHOWN]:
        field = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{field}: {message}" if field else message)
    more = f" (and {len(found) - _ERRORS_SHOWN} more)" if len(found) > _ERRORS_SHOWN else ""
    return StateError(f"{path}: {'; '.join(lines)}{more}", path=str(path))


def _write_durably(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(data)
        file.flush()
        os.fsync(fd)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
