"""The decision log: what the planner decided, from which numbers, and what came of it. It outlives the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo_local.planner.explain import explain
from dynamo_local.planner.record import DecisionRecord, Outcome, StepOutcome, from_line, to_line
from dynamo_local.serve import jsonl
from dynamo_local.serve.jsonl import JsonLog, Record

FILE_NAME = "decisions.jsonl"

KINDS: jsonl.Kinds = (
    ("seq", int),
    ("wall_s", (int, float)),
    ("stimulus_id", str),
    ("inputs", dict),
    ("decision", dict),
)


class DecisionLog(JsonLog):
    """The writing end. See `JsonLog`. Decision 17 caused the events whose `stimulus_id` is `planner:17`."""

    what = "decision"
    kinds = KINDS


def decision_log_path(logs: Path) -> Path:
    """Where the decisions of the namespace with that log folder are."""
    return logs / FILE_NAME


def as_json(record: DecisionRecord) -> dict[str, Any]:
    """A record as it is logged, without its `seq`, which `DecisionLog.append` gives."""
    logged: dict[str, Any] = json.loads(to_line(record))
    return logged


def read(path: Path, *, last: int | None = None) -> list[Record]:
    """The last so many decisions as logged, in order, rotated files included; empty if there was none."""
    return jsonl.read(path, KINDS, last=last)


def parse(logged: Record) -> DecisionRecord:
    """A line of the log. Raises `BadInput` for one of another version, or edited."""
    return from_line(json.dumps(logged))


def words(logged: Record) -> str:
    """The decision as a person is told of it: a line for each component, and what became of each step.

    Raises `BadInput` as `parse` does.
    """
    record = parse(logged)
    return "\n".join([*explain(record.decision), *(_became(name, step) for name, step in record.outcomes.items())])


def _became(component: str, step: StepOutcome) -> str:
    if step.outcome is Outcome.COMMITTED:
        return f"{component}: carried out on {', '.join(step.workers) or 'no worker'}"
    if step.outcome is Outcome.REFUSED:
        return f"{component}: refused ({step.reason}); it is decided again by the next interval"
    if step.outcome is Outcome.NO_OPERATION:
        return f"{component}: not carried out (no-operation)"
    if step.outcome is Outcome.WRITTEN:
        words: dict[bool | None, str] = {True: ", which was carried out", False: ", which nobody has acknowledged"}
        done = words.get(step.acknowledged, "")
        return f"{component}: written to etcd as decision {step.decision_id}{done}"
    if step.outcome is Outcome.SKIPPED:
        return f"{component}: nothing written, etcd says the same already"
    return f"{component}: put off until a GPU is free"
