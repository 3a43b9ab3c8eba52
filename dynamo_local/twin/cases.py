"""Several runs of one trace, side by side: the planner, fixed fleets, or a sweep of options."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from dynamo_local.core.routing import LeastLoaded, Picker
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.runners import InlineForecaster
from dynamo_local.planner.policies.options import PolicyOptions
from dynamo_local.twin.options import TwinOptions
from dynamo_local.twin.simulation import Run, Simulation
from dynamo_local.twin.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `planner` None: the fleet stays as it is. With `no_operation` it decides, and nothing is done.

    `make_picker` is called in the process that runs the case.
    """

    name: str
    options: TwinOptions
    planner: PolicyOptions | None = None
    no_operation: bool = False
    make_picker: Callable[[], Picker] = LeastLoaded


def run_case(trace: Sequence[TraceRequest], case: Case) -> Run:
    """The run of one case. Raises what its options are refused with."""
    planner = None
    if case.planner is not None:
        planner = PolicyDriver(policy_of(case.planner), 0.0, forecaster=InlineForecaster())
    simulation = Simulation(
        case.options, trace, planner=planner, no_operation=case.no_operation, picker=case.make_picker()
    )
    return simulation.run()


def run_cases(trace: Sequence[TraceRequest], cases: Sequence[Case], jobs: int | None = None) -> list[Run]:
    """The runs, in the order of the cases; up to `jobs` at once (None: one for each core), each in a process."""
    workers = min(len(cases), jobs or len(os.sched_getaffinity(0)))
    if workers < 2:
        return [run_case(trace, case) for case in cases]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(partial(run_case, trace), cases))
