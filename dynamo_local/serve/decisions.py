"""The decision log: what the planner decided, from which numbers, and what came of it. It outlives the run."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.serve import jsonl
from dynamo_local.serve.jsonl import JsonLog, Record

FILE_NAME = "decisions.jsonl"

KINDS: jsonl.Kinds = (("seq", int), ("time", (int, float)), ("reasons", list))


class DecisionLog(JsonLog):
    """The writing end. See `JsonLog`. A decision's `seq` is its number: `planner:17` caused its events."""

    what = "decision"
    kinds = KINDS


def decision_log_path(logs: Path) -> Path:
    """Where the decisions of the namespace with that log folder are."""
    return logs / FILE_NAME


def read(path: Path, *, last: int | None = None) -> list[Record]:
    """The last so many decisions, in order, rotated files included; empty if there was none."""
    return jsonl.read(path, KINDS, last=last)
