"""The series that predictors are compared on: recorded hours where they lie, generated ones else, cut into windows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.traces import folder, generated
from dynamo_local.planner.choosing import read_warmup
from dynamo_local.planner.values import Series
from dynamo_local.simulator.trace import write_trace

COLUMNS = ("num_req", "isl", "osl")


@dataclass(frozen=True, slots=True)
class Trace:
    """A file of the traces' folder, and what is generated in its place. None: only generated."""

    title: str
    window_s: float
    file: str | None
    word: str


TRACES = (
    Trace("a chat service, long prompts", 60.0, "conversation_trace.jsonl.gz", "chat"),
    Trace("a chat service, short prompts", 60.0, "azure2023_conv.mooncake.jsonl.gz", "code,rate=5"),
    Trace("sinusoid, period 150 s", 10.0, "sin_rr5-20_T150_d600_i3000o150.jsonl.gz", "sin"),
    Trace(
        "sinusoid, period 600 s",
        30.0,
        "sin_rr5-45_T600_d1800_i3000o300.jsonl.gz",
        "sin,rate=25,amplitude=0.8,period=600,duration=1800,osl=300",
    ),
    Trace("a day of chat, generated", 180.0, None, "chat,duration=86400,rate=0.5,amplitude=0.8"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """The windows of one trace. `source` says what it was made of."""

    title: str
    window_s: float
    source: str
    columns: dict[str, tuple[float, ...]]


def cases(short: bool, env: Mapping[str, str] = os.environ) -> Iterator[Case]:
    """All of them; the day is long to make, and left out of a short run."""
    for trace in TRACES:
        if short and trace.file is None:
            continue
        recorded = None if trace.file is None else folder(env) / trace.file
        if recorded is not None and recorded.exists():
            yield _case(trace, recorded, recorded.name)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            made = generated(trace.word)
            path = Path(scratch) / "made.jsonl"
            write_trace(path, made.rows)
            yield _case(trace, path, made.name)


def _case(trace: Trace, path: Path, source: str) -> Case:
    series = Series(trace.window_s).warmed_up(read_warmup(str(path), trace.window_s))
    return Case(trace.title, trace.window_s, source, dict(zip(COLUMNS, series.columns, strict=True)))
