"""The decision log: what the planner decided, from which numbers, and what came of it. It outlives the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dynamo_local.planner.policies.explain import explain
from dynamo_local.planner.records.figures import window_figures
from dynamo_local.planner.records.record import DecisionRecord, Outcome, StepOutcome, from_line, to_line
from dynamo_local.system.logs import jsonl
from dynamo_local.system.logs.jsonl import JsonLog, Record

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
    """The `last` decisions as logged, in order, rotated files included; empty if there was none."""
    return jsonl.read(path, KINDS, last=last)


def oldest_first(path: Path) -> Iterator[Record]:
    """All decisions as logged, in order, one at a time."""
    return jsonl.oldest_first(path, KINDS)


def parse(logged: Record) -> DecisionRecord:
    """A line of the log. Raises `BadInput` for one of another version, or edited."""
    return from_line(json.dumps(logged))


def words(logged: Record) -> str:
    """The decision in words: what was seen and expected, a line for each component, and the outcome of each step.

    Raises `BadInput` as `parse` does.
    """
    record = parse(logged)
    became = (_became(name, step) for name, step in record.outcomes.items())
    return "\n".join([*_window(logged), *explain(record.decision), *became])


_SEEN = (
    ("requests_per_second", "{:.4g} requests/s"),
    ("input_sequence_tokens", "prompts of {:,.0f}"),
    ("output_sequence_tokens", "answers of {:,.0f} tokens"),
    ("ttft_ms", "TTFT {:.4g} ms"),
    ("itl_ms", "ITL {:.3g} ms"),
)


def _window(logged: Record) -> Iterator[str]:
    """`seen: 4 requests/s, prompts of 3,000, …; expected: 5 requests/s, …; a worker takes: 2.5 requests/s (prefill), …`

    Nothing where the decision was not about that.
    """
    found = window_figures(logged) or {}
    told = {}
    for what, prefix in (("seen", "observed"), ("expected", "predicted")):
        known = ((found.get(f"{prefix}_{name}"), form) for name, form in _SEEN)
        told[what] = [form.format(value) for value, form in known if value is not None]
    capacity = ((role, found.get(f"engine_{role}_capacity_requests_per_second")) for role in ("prefill", "decode"))
    told["a worker takes"] = [f"{value:.4g} requests/s ({role})" for role, value in capacity if value is not None]
    parts = [f"{what}: {', '.join(values)}" for what, values in told.items() if values]
    if parts:
        yield "; ".join(parts)


def _became(component: str, step: StepOutcome) -> str:
    if step.outcome is Outcome.COMMITTED:
        return f"{component}: carried out{' on ' if step.workers else ''}{', '.join(step.workers)}"
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
