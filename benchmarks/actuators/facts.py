"""The records of a run of the ways, as values and as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from dynamo_local.core.lead_times import OptionKind

Seconds = dict[OptionKind, list[float]]
"""Seconds of each way, one per time."""


@dataclass(slots=True)
class OfEngine:
    """`stages` of each start, by scaling option: its worker's own line, stage by stage. `by_hand` are seconds of the
    engine's own server, started by hand, to its first token."""

    seconds: Seconds = field(default_factory=dict)
    stages: dict[OptionKind, list[dict[str, float]]] = field(default_factory=dict)
    by_hand: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Facts:
    """`engines` by name; `load` is the machine's before and after; `absent` says what was not measured, and why."""

    machine: dict[str, Any]
    load: tuple[float, float]
    engines: dict[str, OfEngine] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    @classmethod
    def load_from(cls, text: str) -> Self:
        """Those that `dumps` gave."""
        raw = json.loads(text)
        engines = {
            name: OfEngine(
                {OptionKind(rung): seconds for rung, seconds in of["seconds"].items()},
                {OptionKind(rung): stages for rung, stages in of["stages"].items()},
                of.get("by_hand", []),
            )
            for name, of in raw["engines"].items()
        }
        before, after = raw["load"]
        return cls(raw["machine"], (before, after), engines, raw["absent"])

    def dumps(self) -> str:
        """JSON."""
        return json.dumps(asdict(self), indent=1)


@dataclass(slots=True)
class Kept:
    """`measured_pages.KeptFacts` of them."""

    facts: Facts

    @classmethod
    def load(cls, path: Path, /) -> Self:
        """See `KeptFacts`."""
        return cls(Facts.load_from(path.read_text(encoding="utf-8")))

    def save(self, path: Path, /) -> None:
        """See `KeptFacts`."""
        path.write_text(self.facts.dumps(), encoding="utf-8")
