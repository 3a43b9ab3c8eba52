"""How long `dynamo simulate` takes: an hour of a chat service, and the sinusoid of Dynamo's load planner.

Target: the hour (some 12,000 requests and 4.1 M tokens, whether recorded or generated) within 20 s. CPU time is shown
too: on a machine that does other things the wall clock measures those.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.harness import Report, at_most
from benchmarks.traces import SINUSOID, Requests, conversation, generated
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.simulation import Case, run_case
from tests.fakes.planner.options import load_options

TARGET_S = 20.0


def run(short: bool) -> Report:
    """The short form simulates the first 1,000 requests of each."""
    report = Report("simulate")
    limit = 1000 if short else None
    rounds = 1 if short else 3

    def hour() -> Requests:
        return conversation(limit)

    def sinusoid() -> Requests:
        return generated(SINUSOID, limit)

    cases = (
        ("hour of conversations, 4P4D", hour, Case("", SimulationOptions(shape=FleetShape(4, 4)))),
        ("hour of conversations, planner from 1P1D", hour, Case("", SimulationOptions(), load_options())),
        ("sinusoid, planner from 1P1D", sinusoid, Case("", SimulationOptions(), load_options())),
    )
    for name, make, case in cases:
        walls, cpus = zip(*(_timed(make, case) for _ in range(rounds)), strict=True)
        target = at_most(TARGET_S) if make is hour and not short else None
        report.add(f"{name}: wall clock", "s", walls, target)
        report.add(f"{name}: CPU", "s", cpus)
    report.notes.append(f"the hour: {conversation(1).told}")
    return report


def _timed(make: Callable[[], Requests], case: Case) -> tuple[float, float]:
    """Reading the trace, or making it, included: that is what a user waits for."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run_case(make().rows, case)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s
