"""A statefile in memory, with the real store's validation: disks that fill up, files that somebody edits, crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.errors import StateError
from dynamo_local.state.raw import StateMissing
from dynamo_local.state.schema import State
from dynamo_local.state.store import Removal, StateStore, dump, validated


@dataclass
class MemoryFile:
    """The one file. `text` is None where there is none; `full` refuses writes; `edited` says that somebody edited it.

    `aside` is what was set aside.
    """

    text: str | None = None
    full: bool = False
    edited: bool = False
    version: int = 0
    aside: list[str] = field(default_factory=list)


class MemoryStore(StateStore):
    """`on_write("before" | "after")` is called around every write of this one store: a crash may be raised there."""

    def __init__(
        self, file: MemoryFile, *, run_id: str | None = None, on_write: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(Path("/simulated/statefile.json"), run_id=run_id)
        self.file = file
        self._mine = run_id
        self._on_write = on_write

    def stamp(self) -> object:
        return self.file.version

    def read(self) -> State:
        return validated(self.path, self._text())

    def create(self, state: State) -> None:
        if self.file.text is not None:
            raise StateError(f"{self.path} exists already", path=str(self.path))
        self._put(dump(self.path, state))

    def rewrite(self, state: State) -> Path | None:
        text = dump(self.path, state)
        aside = self.set_aside_if_broken()
        self._put(text)
        return aside

    def set_aside_if_broken(self) -> Path | None:
        try:
            self.read()
        except StateMissing:
            return None
        except StateError:
            assert self.file.text is not None
            self.file.aside.append(self.file.text)
            self.file.text = None
            self.file.version += 1
            return self.path.with_name(f"{self.path.name}.corrupt-{len(self.file.aside)}")
        return None

    @contextmanager
    def transaction(self) -> Iterator[State]:
        before = self._text()
        state = validated(self.path, before)
        if self._mine is not None and state.run_id != self._mine:
            raise StateError(f"{self.path} belongs to run {state.run_id}", path=str(self.path))
        yield state
        after = dump(self.path, state)
        if after != before:
            self._put(after)

    def remove_if_owned(self, run_id: str) -> Removal:
        try:
            owner = self.read().run_id
        except StateMissing:
            return Removal.ABSENT
        except StateError:
            return Removal.NOT_OURS
        if owner != run_id:
            return Removal.NOT_OURS
        self.file.text = None
        return Removal.REMOVED

    def _text(self) -> str:
        if self.file.text is None:
            raise StateMissing(f"there is no statefile {self.path}")
        return self.file.text

    def _put(self, text: str) -> None:
        if self._on_write is not None:
            self._on_write("before")
        if self.file.full:
            raise StateError(f"{self.path} cannot be written: No space left on device", path=str(self.path))
        self.file.text = text
        self.file.version += 1
        if self._on_write is not None:
            self._on_write("after")
