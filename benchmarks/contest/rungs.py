"""`python -m benchmarks.contest.rungs [--facts FILE] [--minutes N] [--page]`: `slo` with faster scaling options.

The same requests, planned by `slo` with cold starts alone, at several prices of a GPU, and with flips and workers on
standby. Cold starts give a curve of missed requests over GPU-hours; the other run is held against that curve where it
has as many GPU-hours. Each run is kept in FILE as soon as it is done; exit code 3: runs are left.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.contest.kept import KeptRows
from benchmarks.contest.measuring import here, today
from benchmarks.measured_pages import write_measured
from benchmarks.traces import generated
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.choosing import policy_of
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.metrics import measure
from dynamo_local.simulator.options import FleetShape, LeadOptions, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, run_case
from dynamo_local.simulator.trace import TraceRequest

PAGE = Path(__file__).parents[2] / "docs" / "contest.md"
COMMAND = "python -m benchmarks.contest.rungs --page"
UNFINISHED = 3
ASKED = 1 / 3
"""So many fewer requests are to be missed than with cold starts alone."""
SLO = Slo(2000, 25)
GPUS, FIRST = 8, FleetShape(2, 2)
LEADS = LeadOptions(flip_s=0.4, wake_s=3.0, cold_s=45.0)
SEEDS = range(3)
WAYS = ("starts", "wakes", "flips")
COLD, ALL_ON = "cold starts", "4P4D"


@dataclass(frozen=True, slots=True)
class Stretch:
    """So many seconds of what `dynamo simulate --generate WORD` makes."""

    word: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind, of which there is another sample for each seed. `told` says what they are."""

    name: str
    told: str
    stretches: tuple[Stretch, ...]

    def requests(self, seed: int) -> list[TraceRequest]:
        """Stretch after stretch."""
        found: list[TraceRequest] = []
        after_s, block = 0.0, 0
        for number, stretch in enumerate(self.stretches):
            word = f"{stretch.word},duration={stretch.seconds:g},seed={seed * 100 + number}"
            made = generated(word).rows
            found += [
                replace(each, at_s=after_s + each.at_s, hash_ids=tuple(block + name for name in each.hash_ids))
                for each in made
            ]
            after_s += stretch.seconds
            block = 1 + max((name for each in found for name in each.hash_ids), default=0)
        return found


LOADS = (
    Load(
        "bursts",
        "a chat service in bursts, whose rate rises and falls by 70 % in 400 s",
        (Stretch("chat,rate=3.4,cv=3,period=400,amplitude=0.7", 1200),),
    ),
    Load(
        "steps",
        "a chat service whose rate goes from 2 to 5 requests/s and back at once, every 150 s",
        (Stretch("chat,rate=2", 150), Stretch("chat,rate=5", 150)) * 4,
    ),
    Load(
        "shifts",
        "long prompts with short answers, and short ones with long answers, in turn, each for 200 s",
        (Stretch("chat,rate=4,osl=80", 200), Stretch("chat,rate=8,isl=1000,osl=500", 200)) * 3,
    ),
)


@dataclass(frozen=True, slots=True)
class Rungs:
    """The planner's scaling options. `standby`: so many of each role sleep, and are so at the beginning."""

    name: str
    flips: bool = False
    standby: int | None = None


RUNGS = (
    Rungs(COLD),
    Rungs("flips", flips=True),
    Rungs("1 of each role on standby", standby=1),
    Rungs("flips, 1 of each role on standby", flips=True, standby=1),
)
PRICES = (0.25, 0.5, 1.0, 2.0)
"""`thrift` of the runs with cold starts alone: the curve. The others have 1."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run. `missed`: requests that did not keep both targets. `gpu_hours` are those of workers that start, serve,
    drain or wake, and one start for each worker that slept at the beginning."""

    load: str
    seed: int
    rungs: str
    thrift: float
    requests: int
    missed: int
    gpu_hours: float
    done_by: dict[str, int]
    took_s: float
    date: str
    machine: str

    @property
    def key(self) -> tuple[str, int, str, float]:
        """Two runs with the same key are the same."""
        return (self.load, self.seed, self.rungs, self.thrift)


class Facts(KeptRows[Row]):
    """The rows of a page."""

    __slots__ = ()

    @staticmethod
    def row_of(told: dict[str, Any]) -> Row:
        return Row(**told)

    def of(self, load: str, rungs: str, seed: int | None = None) -> list[Row]:
        """Those of a load with these scaling options, by GPU-hours."""
        found = [row for row in self.rows if (row.load, row.rungs) == (load, rungs) and seed in (None, row.seed)]
        return sorted(found, key=lambda row: row.gpu_hours)


def measure_all(facts: Facts, seeds: Sequence[int], until_s: float, say: Callable[[str], None]) -> bool:
    """All runs that are not kept yet; whether none is left. None is begun after `until_s` (`time.monotonic`)."""
    done = {row.key for row in facts.rows}
    for load in LOADS:
        for seed in seeds:
            missing = [each for each in _runs() if (load.name, seed, each[0], each[2]) not in done]
            requests = load.requests(seed) if missing else []
            for name, rungs, thrift in missing:
                if time.monotonic() >= until_s:
                    return False
                row = run(load.name, seed, requests, name, rungs, thrift)
                facts.add(row)
                say(
                    f"{load.name} {seed}, {name}, thrift {thrift:g}: {row.missed / row.requests:.2%} missed at "
                    f"{row.gpu_hours:.3f} GPU-hours, {row.took_s:.0f} s"
                )
    return True


def _runs() -> Iterator[tuple[str, Rungs | None, float]]:
    """Name, scaling options (None: a fleet that stays as it is) and cost factor."""
    yield ALL_ON, None, 0.0
    for rungs in RUNGS:
        for thrift in PRICES if rungs.name == COLD else (1.0,):
            yield rungs.name, rungs, thrift


def run(load: str, seed: int, requests: Sequence[TraceRequest], name: str, rungs: Rungs | None, thrift: float) -> Row:
    """One run of these requests, with these scaling options (None: all GPUs are always on)."""
    began_s = time.monotonic()
    options = SimulationOptions(shape=FleetShape(4, 4), gpus=GPUS, leads=LEADS, conditional=False)
    planner, asleep = None, 0
    if rungs is not None:
        standby = None if rungs.standby is None else FleetShape(rungs.standby, rungs.standby)
        asleep = 2 * (rungs.standby or 0)
        options = replace(options, shape=FIRST, flips=rungs.flips, standby=standby)
        planner = PlannerConfig(
            policy="slo",
            profile_results_dir=Path(DEFAULT_PROFILE),
            ttft_ms=SLO.ttft_ms or 0.0,
            itl_ms=SLO.itl_ms or 0.0,
            cost_factor=thrift,
            max_gpu_budget=GPUS,
        )
    found = measure(
        run_case(requests, Case("", options, planner=planner, make_policy=partial(policy_of, start_up_s=LEADS.cold_s))),
        SLO,
    )
    return Row(
        load=load,
        seed=seed,
        rungs=name,
        thrift=thrift,
        requests=found.requests,
        missed=found.requests - round(found.attainment * found.requests),
        gpu_hours=found.gpu_hours + asleep * LEADS.cold_s / 3600,
        done_by=found.done_by,
        took_s=time.monotonic() - began_s,
        date=today(),
        machine=here(),
    )


def missed_at(hours: float, curve: Sequence[tuple[float, float]]) -> float:
    """Misses with so many GPU-hours, on the line through these points (GPU-hours ascending, missed). More of them never
    miss more. Beyond an end the line goes on level."""
    falling: list[tuple[float, float]] = []
    for at, missed in curve:
        falling.append((at, min(missed, falling[-1][1]) if falling else missed))
    if hours <= falling[0][0]:
        return falling[0][1]
    for (low, more), (high, less) in pairwise(falling):
        if hours <= high:
            return more + (less - more) * (hours - low) / (high - low)
    return falling[-1][1]


def spared(facts: Facts, load: str, rungs: str) -> list[float]:
    """For each seed: the part of the requests that are missed with cold starts alone, at as many GPU-hours, that is not
    missed with these scaling options."""
    found = []
    for row in sorted(facts.of(load, rungs), key=lambda each: each.seed):
        curve = [(each.gpu_hours, float(each.missed)) for each in facts.of(load, COLD, row.seed)]
        if len(curve) == len(PRICES):
            found.append(1 - row.missed / max(1.0, missed_at(row.gpu_hours, curve)))
    return found


def section(facts: Facts) -> str:
    """The measured figures, as markdown."""
    lines: list[str] = []
    for load in LOADS:
        rows = [row for row in facts.rows if row.load == load.name]
        if rows:
            seeds = len({row.seed for row in rows})
            told = f"{seeds} samples" if seeds > 1 else "one sample"
            lines += [f"**{load.name}**: {load.told}; {told}.", "", *_table(facts, load), ""]
    dates = "; ".join(sorted({f"{row.date}, {row.machine}" for row in facts.rows}))
    took_s = sum(row.took_s for row in facts.rows)
    lines.append(f"{dates}; {took_s / 60:.0f} min for {len(facts.rows)} runs.")
    return "\n".join(lines)


def _table(facts: Facts, load: Load) -> Iterator[str]:
    yield "| Scaling options | `cost-factor` | Missed | GPU-hours | Starts, wakes, flips | Fewer missed (least, most) |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, _, thrift in _runs():
        rows = [row for row in facts.of(load.name, name) if row.thrift == thrift]
        if rows:
            missed = sum(row.missed for row in rows) / sum(row.requests for row in rows)
            how = ", ".join(f"{fmean(row.done_by.get(way, 0) for row in rows):.0f}" for way in WAYS)
            cells = (f"{thrift:g}" if thrift else "–", f"{missed:.2%}", f"{fmean(row.gpu_hours for row in rows):.3f}")
            yield f"| {name} | {' | '.join(cells)} | {how} | {_spared(facts, load.name, name)} |"


def _spared(facts: Facts, load: str, rungs: str) -> str:
    parts = spared(facts, load, rungs) if rungs not in (COLD, ALL_ON) else []
    if not parts:
        return ""
    met = "" if fmean(parts) >= ASKED else ": **less than a third**"
    ends = {seed: facts.of(load, COLD, seed)[-1].gpu_hours for seed in {row.seed for row in facts.of(load, COLD)}}
    beyond = any(row.gpu_hours > ends.get(row.seed, math.inf) for row in facts.of(load, rungs))
    around = f" ({min(parts):.0%}, {max(parts):.0%})" if len(parts) > 1 else ""
    return f"{fmean(parts):.0%}{around}{met}{', beyond the end of a line' if beyond else ''}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contest.rungs", description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=Path, help="keep each run in this file, and do not repeat those that it has")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="samples of each load")
    parser.add_argument("--page", action="store_true", help="write it into docs/contest.md")
    options = parser.parse_args()
    facts = Facts.load(options.facts)
    until_s = time.monotonic() + options.minutes * 60
    whole = measure_all(facts, range(options.seeds), until_s, lambda line: print(line, file=sys.stderr, flush=True))
    text = section(facts)
    print(text)
    if options.page:
        write_measured(PAGE, COMMAND, text)
    return 0 if whole else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
