"""The frontier of fixed fleets: the share that each keeps of a load, in the simulator of a judge.

Judges are ours, with `slo`'s dispatch, and Dynamo's replay (`replayed.py`). Every run is kept in a file for each load,
named by the hash of its requests, so it is made once.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.contest.trials import Fleet
from benchmarks.regret.families import Load
from dynamo_local.components.dispatcher import sim_picker
from dynamo_local.core.routing.estimates import Targets
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.simulator.metrics import gpu_seconds, within
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.simulation import Case, Run, run_case

WINDOW_S = 600.0
"""Figures of a run are kept for windows of so long, by the arrival of a request."""
ENOUGH = 0.999
"""A fixed fleet that keeps so many ends the frontier."""
LITTLE = 0.001
"""Two GPUs more that gain less than this end it too."""
HOPELESS = 0.7
"""A fleet that keeps fewer is the smallest of interest."""
FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Row:
    """One run. `came`, `kept`: requests of each window, and those of them that were within both targets. `gpu_s`:
    GPU-seconds held in each window; the last window ends with the last arrival."""

    policy: str
    fleet: Fleet
    came: tuple[int, ...]
    kept: tuple[int, ...]
    gpu_s: tuple[float, ...]
    took_s: float
    code: str = ""

    def share(self, first: int = 0) -> float:
        """The part of the requests from that window on that kept both targets; 1 of none."""
        return sum(self.kept[first:]) / max(1, sum(self.came[first:])) if any(self.came[first:]) else 1.0

    def gpu_hours(self, first: int = 0) -> float:
        """GPU-hours from that window on."""
        return math.fsum(self.gpu_s[first:]) / 3600


Maker = Callable[[], Policy[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run. `kept`: arrivals (seconds) of requests within both targets. `gpu_s`: GPU-seconds held
    in each window."""

    kept: Sequence[float]
    gpu_s: tuple[float, ...]


Simulator = Callable[[Load, Fleet, Maker | None], Outcome]
"""Runs a load through that fleet, which the made policy changes (None: which stays)."""


@dataclass(slots=True)
class Runs:
    """The runs of one load. With a `folder` they are kept there, and those of earlier calls are found there."""

    load: Load
    folder: Path | None = None
    simulator: Simulator = field(default_factory=lambda: ours)
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self.rows = [_row_of(row) for row in json.loads(self.path.read_text(encoding="utf-8"))["rows"]]

    @property
    def path(self) -> Path | None:
        """Its file."""
        return (
            None
            if self.folder is None
            else self.folder / f"{self.load.family}-{self.load.seed}-{hashed(self.load)}.json"
        )

    def fixed(self, fleet: Fleet) -> Row:
        """The run of a fleet that stays as it is."""
        return self.kept(FIXED, fleet, "", None)

    def kept(self, policy: str, fleet: Fleet, code: str, maker: Maker | None) -> Row:
        """The run of that policy from that fleet. `code` is the hash of its sources: others make another run."""
        for row in self.rows:
            if (row.policy, row.fleet, row.code) == (policy, fleet, code):
                return row
        began_s = time.monotonic()
        outcome = self.simulator(self.load, fleet, maker)
        row = measured(policy, fleet, code, self.load, outcome, round(time.monotonic() - began_s, 1))
        self.rows = [*(old for old in self.rows if (old.policy, old.fleet) != (policy, fleet)), row]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps({"load": self.load.name, "rows": [asdict(each) for each in self.rows]}))
            beside.replace(self.path)
        return row


def hashed(load: Load) -> str:
    """The name of these requests and of what they are served under."""
    told = hashlib.sha256(repr((load.slo, load.speed, load.start_up_s, load.first, load.cap)).encode())
    for each in load.requests:
        told.update(repr((each.at_s, each.input_length, each.output_length, each.hash_ids)).encode())
    return told.hexdigest()[:16]


def _row_of(told: dict[str, Any]) -> Row:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return Row(**values)


# --- runs


def simulated(load: Load, fleet: Fleet, policy: Maker | None) -> Run:
    """The load through that fleet, which `policy` changes (None: which stays), with `slo`'s dispatch and routing."""
    sim = SimOptions(speed=load.speed)
    targets = Targets.of_ms(load.slo.ttft_ms, load.slo.itl_ms)
    options = SimulationOptions(
        shape=FleetShape(*fleet),
        sim=sim,
        gpus=load.cap,
        start_up_s=load.start_up_s,
        disagg_policy="slo",
        targets=targets,
    )
    picker = partial(sim_picker, "slo", 0, sim, targets)
    if policy is None:
        return run_case(load.requests, Case("", options, make_picker=picker))
    made = policy()
    return run_case(load.requests, Case("", options, made.options, lambda options: made, make_picker=picker))


def ours(load: Load, fleet: Fleet, policy: Maker | None) -> Outcome:
    """Our simulator (a `Simulator`)."""
    run = simulated(load, fleet, policy)
    kept = [job.request.at_s for job in run.jobs if within(job, load.slo)]
    return Outcome(kept, by_window(partial(gpu_seconds, run.points), load))


def by_window(gpu_s: Callable[[float], float], load: Load) -> tuple[float, ...]:
    """GPU-seconds of each window, by those that were held until a time (seconds).

    The last window ends with the last arrival.
    """
    end_s = load.requests[-1].at_s
    ends = [min(end_s, WINDOW_S * (number + 1)) for number in range(max(1, math.ceil(end_s / WINDOW_S)))]
    return tuple(round(after - before, 3) for before, after in pairwise([0.0, *map(gpu_s, ends)]))


def measured(policy: str, fleet: Fleet, code: str, load: Load, outcome: Outcome, took_s: float) -> Row:
    """The run's row."""
    windows = len(outcome.gpu_s)
    came = _by_window((each.at_s for each in load.requests), windows)
    return Row(policy, fleet, came, _by_window(outcome.kept, windows), outcome.gpu_s, took_s, code)


def _by_window(times: Iterable[float], windows: int) -> tuple[int, ...]:
    found = [0] * windows
    for at_s in times:
        found[min(windows - 1, int(at_s / WINDOW_S))] += 1
    return tuple(found)


# --- the frontier


def frontier(runs: Runs, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Fixed fleets from one that keeps few requests to those that more GPUs do not help.

    From the best split of one number of GPUs both ways to one more, and to one fewer, are tried.
    """
    found: dict[Fleet, Row] = {}

    def best(*fleets: Fleet) -> Fleet:
        for fleet in fleets:
            if min(fleet) >= 1 and fleet not in found:
                found[fleet] = runs.fixed(fleet)
                say(f"{runs.load.name}: fixed {FleetShape(*fleet)} keeps {found[fleet].share():.2%}")
        return max((fleet for fleet in fleets if fleet in found), key=lambda fleet: found[fleet].share())

    middle, before = best(runs.load.likely), (0, 0)
    while middle != before:
        before, middle = middle, best(middle, (middle[0] - 1, middle[1] + 1), (middle[0] + 1, middle[1] - 1))
    fleet, shares = middle, [found[middle].share()]
    while shares[-1] < ENOUGH and sum(fleet) < runs.load.cap:
        fleet = best((fleet[0] + 1, fleet[1]), (fleet[0], fleet[1] + 1))
        shares.append(found[fleet].share())
        if len(shares) > 2 and shares[-1] > HOPELESS and shares[-1] - shares[-3] < LITTLE:
            break
    fleet = middle
    while sum(fleet) > 2 and found[fleet].share() > HOPELESS:
        fleet = best((fleet[0] - 1, fleet[1]), (fleet[0], fleet[1] - 1))
    return list(found.values())


Point = tuple[float, float]
"""GPU-hours, and the share that they keep."""


def hull(points: Iterable[Point]) -> list[Point]:
    """The points that no mixture of others beats, by GPU-hours: from nothing at no cost to the highest share.

    Between two of them a mixture of both fleets in time lies on the line.
    """
    found: list[Point] = [(0.0, 0.0)]
    for hours, share in sorted(points, key=lambda point: (point[0], -point[1])):
        if share <= found[-1][1]:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-1], (hours, share)):
            found.pop()
        found.append((hours, share))
    return found


def _slope(one: Point, other: Point) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] > one[0] else math.inf


def least_hours(line: Sequence[Point], share: float) -> float:
    """The fewest GPU-hours of a fixed fleet, or a mixture of two, that keeps that share; those of the largest fleet
    where none keeps as much."""
    place = bisect_left([point[1] for point in line], share)
    if place == 0:
        return line[0][0]
    if place == len(line):
        return line[-1][0]
    (low, fewer), (high, more) = line[place - 1], line[place]
    return low + (high - low) * (share - fewer) / (more - fewer)


def share_at(line: Sequence[Point], hours: float) -> float:
    """The share that a fixed fleet, or a mixture of two, keeps at so many GPU-hours."""
    place = bisect_left([point[0] for point in line], hours)
    if place == 0:
        return line[0][1]
    if place == len(line):
        return line[-1][1]
    (low, fewer), (high, more) = line[place - 1], line[place]
    return fewer + (more - fewer) * (hours - low) / (high - low)
