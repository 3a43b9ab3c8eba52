"""How long `dynamo simulate` takes: the Mooncake conversation trace, and the sinusoid of Dynamo's load planner.

Target: the conversation trace (12,031 requests, 4.1 M tokens) within 20 s. CPU time is shown too: on a machine that
does other things the wall clock measures those.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.harness import Report, at_most
from dynamo_local.planner.load import LoadOptions
from dynamo_local.twin.cases import Case, run_case
from dynamo_local.twin.options import FleetShape, TwinOptions
from dynamo_local.twin.trace import read_trace

DATA = Path(__file__).parent / "data"
CONVERSATION = DATA / "conversation_trace.jsonl.gz"
SINUSOID = DATA / "sin_rr5-20_T150_d600_i3000o150.jsonl.gz"
TARGET_S = 20.0


def run(short: bool) -> Report:
    """The short form simulates the first 1,000 requests of each."""
    report = Report("simulate")
    limit = 1000 if short else None
    rounds = 1 if short else 3
    cases = (
        ("conversation trace, 4P4D", CONVERSATION, Case("", TwinOptions(shape=FleetShape(4, 4)))),
        ("conversation trace, planner from 1P1D", CONVERSATION, Case("", TwinOptions(), LoadOptions())),
        ("sinusoid, planner from 1P1D", SINUSOID, Case("", TwinOptions(), LoadOptions())),
    )
    for name, trace, case in cases:
        walls, cpus = zip(*(_timed(trace, case, limit) for _ in range(rounds)), strict=True)
        target = at_most(TARGET_S) if trace == CONVERSATION and not short else None
        report.add(f"{name}: wall clock", "s", walls, target)
        report.add(f"{name}: CPU", "s", cpus)
    return report


def _timed(trace: Path, case: Case, limit: int | None) -> tuple[float, float]:
    """Reading the trace included: that is what a user waits for."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run_case(read_trace(trace, limit=limit), case)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s
