"""Requests that a running server has had, in the formats that recorders and load generators write.

The first line shows the format: a recording (`dynamo.request.trace.v1`, ours or Dynamo's), the result of
`vllm bench serve --save-detailed`, or aiperf's `profile_export.jsonl`. Requests are sorted by their arrival. A request
without lengths, or that got no token, is left out: nobody knows what it would have cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dynamo_local.system.json_lines import BadTrace, Row, read_rows, shown

SCHEMA = "dynamo.request.trace.v1"
HASH_BLOCK_TOKENS = 512
"""How many tokens one id of `hash_ids` stands for (the last one may stand for fewer)."""
_EARLIER_MAX = 99
_NOT_WORKERS = ("Frontend", "Processor", "Router", "Planner")
_VLLM = ("input_lens", "output_lens", "start_times")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request: milliseconds since any beginning, lengths, and hashes of its prompt's blocks of 512 tokens."""

    at_ms: float
    input_length: int
    output_length: int
    hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet of a recording: the one that stood longest, and how many others there were. `prefill` 0: aggregated."""

    prefill: int
    decode: int
    changes: int
    ttft_ms: float | None = None
    itl_ms: float | None = None


def is_recording(first: Row) -> bool:
    """Whether a file's first row belongs to one of the formats of this module."""
    fields = first.fields
    return _event(first) is not None or "metadata" in fields or "input_lens" in fields or "event_type" in fields


def read_recording(path: Path) -> list[Recorded]:
    """All requests of a recording, earlier files (`FILE.1`) included, by arrival. Raises `BadTrace`."""
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        return []
    if "input_lens" in first.fields:
        found = list(_vllm(first))
    elif "metadata" in first.fields:
        found = list(_aiperf(chain([first], rows)))
    else:
        found = list(_dynamo(chain([first], rows)))
    if not found:
        raise BadTrace(f"{path} holds no request that has its lengths and got a token")
    return sorted(found, key=lambda request: request.at_ms)


def read_fleet(path: Path) -> Fleet:
    """The fleet and the targets that a recording names. Raises `BadTrace` if it names none, as Dynamo's own do."""
    shapes: dict[tuple[int, int], float] = {}
    before: tuple[float, tuple[int, int]] | None = None
    changes, last_ms, targets = 0, 0.0, dict[str, Any]()
    for row in _rows(path):
        event = _event(row)
        if event is None:
            continue
        last_ms = max(last_ms, event.milliseconds("event_time_unix_ms"))
        if not event.fields.get("fleet"):
            continue
        shape = _shape(event)
        if before is not None:
            shapes[before[1]] = shapes.get(before[1], 0.0) + last_ms - before[0]
            changes += shape != before[1]
        before, targets = (last_ms, shape), event.fields.get("targets") or {}
    if before is not None:
        shapes[before[1]] = shapes.get(before[1], 0.0) + last_ms - before[0]
    served = {shape: lasted for shape, lasted in shapes.items() if shape[1] > 0}
    if not served:
        raise BadTrace(f"{path} names no fleet, as a file of record-trace does; say --static P,D, not --as-it-was")
    prefill, decode = max(served, key=lambda shape: served[shape])
    return Fleet(prefill, decode, changes, targets.get("ttft_ms"), targets.get("itl_ms"))


def _shape(event: Row) -> tuple[int, int]:
    """Prefill and other workers by their components' names."""
    prefill = decode = 0
    for component in event.inner("fleet").fields:
        workers = event.inner("fleet").tokens(component, least=0)
        if component in _NOT_WORKERS:
            continue
        if "prefill" in component.lower():
            prefill += workers
        else:
            decode += workers
    return prefill, decode


def _rows(path: Path) -> Iterator[Row]:
    earlier = [path.with_name(f"{path.name}.{number}") for number in range(_EARLIER_MAX, 0, -1)]
    for file in (*(file for file in earlier if file.exists()), path):
        yield from read_rows(file, halves=True)


def _event(row: Row) -> Row | None:
    """The event of a line, which Dynamo may wrap into `event`."""
    inner = row.fields.get("event")
    found = Row(inner, row.where) if isinstance(inner, dict) else row
    return found if found.fields.get("schema") == SCHEMA else None


def _dynamo(rows: Iterable[Row]) -> Iterator[Recorded]:
    ids: dict[int, int] = {}
    for row in rows:
        event = _event(row)
        if event is None or event.fields.get("event_type") != "request_end":
            continue
        request = event.inner("request")
        replay = request.inner("replay") if isinstance(request.fields.get("replay"), dict) else None
        output = request.fields.get("output_tokens")
        if replay is None or not output:
            continue
        yield Recorded(
            request.milliseconds("request_received_ms"),
            replay.tokens("input_length"),
            request.tokens("output_tokens"),
            tuple(ids.setdefault(each, len(ids)) for each in _hashes(replay)),
        )


def _hashes(replay: Row) -> list[int]:
    """Hashes of the prompt's beginnings at each 512 tokens, and of the whole."""
    given = replay.fields.get("input_sequence_hashes") or []
    size = replay.tokens("trace_block_size")
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        raise BadTrace(f"{replay.where}: input_sequence_hashes must be a list of whole numbers, not {shown(given)}")
    if HASH_BLOCK_TOKENS % size:
        return []
    step = HASH_BLOCK_TOKENS // size
    found = given[step - 1 :: step]
    return found + given[-1:] if len(given) % step else found


def _vllm(row: Row) -> Iterator[Recorded]:
    lists = {name: row.fields.get(name) for name in _VLLM}
    for name, values in lists.items():
        if not isinstance(values, list):
            raise BadTrace(f"{row.where}: {name} is missing; run `vllm bench serve` with --save-result --save-detailed")
    inputs, outputs, starts = lists.values()
    if not len(inputs or ()) == len(outputs or ()) == len(starts or ()):
        raise BadTrace(f"{row.where}: {', '.join(_VLLM)} have different lengths")
    for each in zip(inputs or (), outputs or (), starts or (), strict=True):
        one = Row(dict(zip(_VLLM, each, strict=True)), row.where)
        if each[0] and each[1]:
            seconds = one.milliseconds("start_times")
            yield Recorded(seconds * 1e3, one.tokens("input_lens"), one.tokens("output_lens"))


def _aiperf(rows: Iterable[Row]) -> Iterator[Recorded]:
    for row in rows:
        metadata, metrics = row.inner("metadata"), row.fields.get("metrics")
        if row.fields.get("error") is not None or metadata.fields.get("benchmark_phase") == "warmup":
            continue
        names = ("input_sequence_length", "output_sequence_length")
        if not isinstance(metrics, dict) or any(name not in metrics for name in names):
            continue
        values = {name: row.inner("metrics").inner(name).fields.get("value") for name in names}
        whole = Row(
            {name: int(value) if isinstance(value, float) else value for name, value in values.items()}, row.where
        )
        if not all(whole.fields.values()):
            continue
        yield Recorded(_of_ns(metadata, "request_start_ns"), whole.tokens(names[0]), whole.tokens(names[1]))


def _of_ns(row: Row, name: str) -> float:
    """A time in nanoseconds as milliseconds."""
    value = row.field(name)
    plain = isinstance(value, int) and not isinstance(value, bool)
    return Row({name: value / 1e6 if plain else value}, row.where).milliseconds(name)
