"""Rows of a measurement that takes long: each is kept as soon as it is there."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

R = TypeVar("R")


@dataclass(slots=True)
class KeptRows(ABC, Generic[R]):
    """All rows so far. With a `path` each new one is written there at once, as a line of JSON."""

    path: Path | None = None
    rows: list[R] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """The rows that are kept there."""
        if path is None or not path.exists():
            return cls(path)
        return cls(path, [cls.row_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()])

    @staticmethod
    @abstractmethod
    def row_of(told: dict[str, Any]) -> R:
        """The dataclass that was written so."""

    def add(self, row: R) -> None:
        """One more."""
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(f"{json.dumps(asdict(row))}\n")  # type: ignore[call-overload]
