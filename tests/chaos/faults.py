"""Faults of a chaos run: their victims, and when all is whole again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.chaos.plan import Action, Kind

WHOLE = ("ready", "draining", "exited", "sleeping", "falling_asleep")
COMMANDED = {Kind.FLIP: ("ready",), Kind.FLIP_CANCEL: ("ready",), Kind.SLEEP: ("ready",)}
"""Whom a command is about that makes sense of these alone."""
ASLEEP = ("sleeping", "falling_asleep")

Status = Mapping[str, Any]


@dataclass(slots=True)
class Fault:
    """Something we broke, from `began_s` until `healed` says so of a status; `ended_s` includes the grace.

    `excuses`: requests may fail of it, if a retry can save them.
    """

    what: str
    began_s: float
    healed: Callable[[Status], bool]
    ended_s: float | None = None
    excuses: bool = True


def during(fault: AbstractContextManager[None], seconds: float) -> None:
    with fault:
        time.sleep(seconds)


def chosen(action: Action, status: Status) -> Mapping[str, Any] | None:
    rows = [row for row in status["workers"] if row["component"] == action.component and row["pid"]]
    if action.kind is Kind.HANG:  # one that hangs while it starts has its start deadline: five minutes
        rows = [row for row in rows if row["state"] != "starting"]
    if action.kind is Kind.WAKE:
        rows = [row for row in status["workers"] if row["state"] in ASLEEP]
    if action.kind in COMMANDED:
        rows = [row for row in rows if row["state"] in COMMANDED[action.kind]]
    return rows[int(action.unit * len(rows))] if rows else None


def replaced(status: Status, victim: Mapping[str, Any]) -> bool:
    """The victim is gone, and if it was to stay, another process is there: it may have had another name by then.
    Somebody of its component serves. The only worker may be restarted while it comes back, and drains for that."""
    rows = status["workers"]
    if any(row["pid"] == victim["pid"] for row in rows) or not ready(rows, victim["component"]):
        return False
    row = next((row for row in rows if row["watcher_name"] == victim["watcher_name"]), None)
    return row is None or row["state"] in WHOLE


def ready(rows: list[Mapping[str, Any]], component: str) -> int:
    return sum(row["component"] == component and row["state"] == "ready" for row in rows)


def send_signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # it has gone by itself meanwhile
