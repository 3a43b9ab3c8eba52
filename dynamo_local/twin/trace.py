"""Traces of requests in Mooncake's format: JSON lines, one request each, in the order of their timestamps.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids of 512-token blocks]}`; a file
whose name ends in `.gz` is gzipped. `hash_ids` may be absent: then no other request shares the prompt's beginning.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.errors import BadInput

HASH_BLOCK_TOKENS = 512
"""How many tokens one id of `hash_ids` stands for (the last one may stand for fewer)."""

_SHOWN = 60


class BadTrace(BadInput):
    """A trace cannot be used; the message names the file, the line and the field."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it comes (seconds after the trace's first), how long it is, and what its blocks hold.

    An id of `hash_ids` stands for its block and all before it. Ids beyond the prompt's end mean nothing.
    """

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> list[TraceRequest]:
    """The requests of a file, the first one at 0 s. `limit` takes the first so many; `speed` divides the times.

    Raises `BadTrace`.
    """
    requests: list[TraceRequest] = []
    begin_ms, last_ms = 0.0, -math.inf
    for number, line in enumerate(_lines(path), start=1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        at_ms, isl, osl, hash_ids = _parse(line, where)
        if not requests:
            begin_ms = at_ms
        if at_ms < last_ms:
            raise BadTrace(
                f"{where}: timestamp {at_ms:g} is before the {last_ms:g} of the line before; sort the trace by time"
            )
        last_ms = at_ms
        requests.append(TraceRequest((at_ms - begin_ms) / 1000 / speed, isl, osl, hash_ids))
    if not requests:
        raise BadTrace(f"{path} holds no request; a trace has one JSON object per line")
    return requests


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadTrace(f"trace {path} cannot be read: {what}") from error
    return data.splitlines()


def _parse(line: bytes, where: str) -> tuple[float, int, int, tuple[int, ...]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadTrace(f"{where}: this is no JSON ({error}): {_shown(line)}") from error
    if not isinstance(row, dict):
        raise BadTrace(f"{where}: a request is a JSON object, not {_shown(line)}")
    timestamp = _field(row, "timestamp", where)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not math.isfinite(timestamp):
        raise BadTrace(f"{where}: timestamp must be a number of milliseconds, not {_shown(timestamp)}")
    if timestamp < 0:
        raise BadTrace(f"{where}: timestamp must be 0 or more, not {_shown(timestamp)}")
    return (
        float(timestamp),
        _count(row, "input_length", where),
        _count(row, "output_length", where),
        _hash_ids(row.get("hash_ids"), where),
    )


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise BadTrace(f"{where}: {name} is missing; the line has: {', '.join(map(str, row)) or 'nothing'}")
    return row[name]


def _count(row: dict[str, Any], name: str, where: str) -> int:
    value = _field(row, name, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadTrace(f"{where}: {name} must be a whole number of tokens, 1 or more, not {_shown(value)}")
    return value


def _hash_ids(value: Any, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadTrace(f"{where}: hash_ids must be a list of whole numbers, not {_shown(value)}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise BadTrace(f"{where}: hash_ids must hold whole numbers, not {_shown(item)}")
    return tuple(value)


def _shown(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def block_keys(hash_ids: Sequence[int], input_length: int, block_size: int) -> Sequence[int]:
    """Keys of the prompt's full KV blocks, as far as `hash_ids` go; `block_size` divides 512."""
    per_id = HASH_BLOCK_TOKENS // block_size
    full = input_length // block_size
    keys = [key for hash_id in hash_ids for key in range(hash_id * per_id, hash_id * per_id + per_id)]
    return keys[:full]


def total_tokens(requests: Iterable[TraceRequest]) -> int:
    """Output tokens of all requests."""
    return sum(request.output_length for request in requests)
