"""The records of a run, as values: scale actions, requests, who sent what to whom."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drain.client import Record

OURS = "drain"


@dataclass(frozen=True, slots=True)
class Policy:
    """How the victim of a scale-down ends. `budget_s`: killed so long (at speed 1) after it was asked; None: never."""

    name: str
    budget_s: float | None


POLICIES = (
    Policy(OURS, None),
    Policy("kill at once", 0.0),
    Policy("5 s", 5.0),
    Policy("10 s", 10.0),
    Policy("30 s", 30.0),
)
LONGEST_BUDGET_S = 30.0


@dataclass(slots=True)
class Down:
    """One scale-down. Times are CLOCK_MONOTONIC seconds, None for what did not happen (or was not seen).

    `asked_s` is before the command was sent; `deregistered_s` when etcd told a watcher that its keys are gone.
    """

    policy: str
    component: str
    worker: str
    pid: int
    lease: int
    asked_s: float
    deregistered_s: float | None = None
    killed_s: float | None = None
    gone_s: float | None = None
    taken_back_s: float | None = None


@dataclass(slots=True)
class Up:
    """One scale-up: a new process, or (`took_back`) a drain that was taken back. `with_policy`: whose wave it was."""

    component: str
    worker: str
    took_back: bool
    asked_s: float
    ready_s: float
    with_policy: str


@dataclass(frozen=True, slots=True)
class Sent:
    """One attempt to send a request to an instance; see `benchmarks.graphs.noted`."""

    at_s: float
    component: str
    lease: int
    request_id: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A command that changes nothing, sent to the control endpoint while so many workers drained."""

    command: str
    took_s: float
    draining: int


@dataclass(slots=True)
class Facts:
    """A whole run. `unasked` names processes that came or went although nobody scaled them (there must be none);
    `cpu_s` is what arbiter, servers and workers used while it was scaled. `over_s`: each killed worker's replacement
    was made so long after the back-off that follows the death. `trace` says whose requests were sent.
    """

    speed: float
    downs: list[Down] = field(default_factory=list)
    ups: list[Up] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    over_s: list[float] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    lasted_s: float = 0.0
    cpu_s: float = 0.0
    trace: str = ""

    def save(self, path: Path) -> None:
        """As JSON, to be judged again later."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Facts:
        """The facts that `save` wrote."""
        data: dict[str, Any] = json.loads(path.read_text())
        return cls(
            speed=data["speed"],
            downs=[Down(**row) for row in data["downs"]],
            ups=[Up(**row) for row in data["ups"]],
            records=[Record(**row) for row in data["records"]],
            sent=[Sent(**row) for row in data["sent"]],
            asked=[Asked(**row) for row in data["asked"]],
            over_s=data["over_s"],
            unasked=data["unasked"],
            lasted_s=data["lasted_s"],
            cpu_s=data["cpu_s"],
            trace=data.get("trace", ""),
        )


def read_notes(folder: Path) -> Iterable[Sent]:
    """The notes of the graph's processes."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield Sent(*json.loads(line))


def read_records(path: Path) -> list[Record]:
    """The client's records."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
