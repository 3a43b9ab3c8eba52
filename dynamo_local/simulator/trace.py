"""Traces of requests. Mooncake's format is JSON lines, one request each, in the order of their timestamps.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids of 512-token blocks]}`; a file
whose name ends in `.gz` is gzipped. `hash_ids` may be absent: then no other request shares the prompt's beginning.
`recordings` has the other formats that are read.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from dynamo_local.simulator.recordings import HASH_BLOCK_TOKENS, is_recording, read_recording
from dynamo_local.system.json_lines import BadTrace, Row, read_rows, shown


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

    The first line shows the format: Mooncake's, or one of `recordings`. Raises `BadTrace`.
    """
    first = next(read_rows(path, halves=True), None)
    if first is not None and is_recording(first):
        recorded = read_recording(path)[:limit]
        return [
            TraceRequest(
                (each.at_ms - recorded[0].at_ms) / 1000 / speed, each.input_length, each.output_length, each.hashes
            )
            for each in recorded
        ]
    return _mooncake(path, limit, speed)


def _mooncake(path: Path, limit: int | None, speed: float) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    begin_ms, last_ms = 0.0, -math.inf
    for row in islice(read_rows(path), limit):
        at_ms = row.milliseconds("timestamp")
        if not requests:
            begin_ms = at_ms
        if at_ms < last_ms:
            raise BadTrace(
                f"{row.where}: timestamp {at_ms:g} is before the {last_ms:g} of the line before; sort the trace by time"
            )
        last_ms = at_ms
        requests.append(
            TraceRequest(
                at_s=(at_ms - begin_ms) / 1000 / speed,
                input_length=row.tokens("input_length"),
                output_length=row.tokens("output_length"),
                hash_ids=_hash_ids(row),
            )
        )
    if not requests:
        raise BadTrace(f"{path} holds no request; a trace has one JSON object per line")
    return requests


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests as `read_trace` reads them, gzipped if the name ends in `.gz`; how many there were.

    One after the other, so an iterator needs no memory. An old file stays until the new one is whole.
    Raises `BadTrace` where the file cannot be written.
    """
    number = 0
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _to(beside, gzipped=path.suffix == ".gz") as lines:
            for request in requests:
                lines.write(f"{_line(request)}\n".encode())
                number += 1
        beside.replace(path)
    except OSError as error:
        raise BadTrace(f"trace {path} cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return number


@contextmanager
def _to(path: Path, *, gzipped: bool) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """The same requests give the same bytes: neither name nor time of writing is in a gzipped file."""
    with path.open("wb") as file:
        if not gzipped:
            yield file
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            yield packed


def _line(request: TraceRequest) -> str:
    at_ms = round(request.at_s * 1000, 3)
    return json.dumps(
        {
            "timestamp": int(at_ms) if at_ms.is_integer() else at_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
    )


def _hash_ids(row: Row) -> tuple[int, ...]:
    value = row.fields.get("hash_ids")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadTrace(f"{row.where}: hash_ids must be a list of whole numbers, not {shown(value)}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise BadTrace(f"{row.where}: hash_ids must hold whole numbers, not {shown(item)}")
    return tuple(value)


def block_keys(hash_ids: Sequence[int], input_length: int, block_size: int) -> Sequence[int]:
    """Keys of the prompt's full KV blocks, as far as `hash_ids` go; `block_size` divides 512."""
    per_id = HASH_BLOCK_TOKENS // block_size
    full = input_length // block_size
    keys = [key for hash_id in hash_ids for key in range(hash_id * per_id, hash_id * per_id + per_id)]
    return keys[:full]


def total_tokens(requests: Iterable[TraceRequest]) -> int:
    """Output tokens of all requests."""
    return sum(request.output_length for request in requests)
