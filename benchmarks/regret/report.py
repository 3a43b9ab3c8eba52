"""Policies on loads, and their regret against the best fixed fleet: rows, a table, and JSON.

Regret: GPU-hours ÷ the fewest GPU-hours with which a fixed fleet keeps the same share of requests, − 1. Gain: the share
that is kept beyond that of a fixed fleet at the same GPU-hours. Negative regret is better than every fixed fleet.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import dynamo_local
from benchmarks.contest.clairvoyant import clairvoyant
from benchmarks.contest.measuring import planner_options, slo_of
from benchmarks.contest.replay_policy import ENGINE, slo
from benchmarks.contest.trials import Fleet, Trial
from benchmarks.regret.families import EVEN, ODD, Load, load_of
from benchmarks.regret.frontier import FIXED, WINDOW_S, Maker, Row, Runs, frontier, hull, least_hours, ours, share_at
from benchmarks.regret.replayed import in_replay
from benchmarks.regret.rivals import RIVALS
from benchmarks.traces import Requests
from dynamo_local.core.routing.estimates import Timing
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE

WARM_UP_S = 7200.0
"""One of two verdicts leaves out so much of the beginning."""
YARDSTICK = 1.2
"""The fixed fleet of the table has so many times the GPUs of the smallest that keeps `TARGET`."""
TARGET = 0.99
CLAIRVOYANT = "clairvoyant"
PLANNERS = ("slo", "load", "sla", "throughput-load")
POLICIES = (*PLANNERS, CLAIRVOYANT, *RIVALS, FIXED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One policy on one load, from `since_s` on. `beyond`: it keeps more than every fixed fleet, and is held against
    the best of them. `took_s`: the run's."""

    family: str
    seed: int
    policy: str
    since_s: float
    requests: int
    share: float
    gpu_hours: float
    regret: float
    gain: float
    beyond: bool
    took_s: float


def judged(
    load: Load, policies: Sequence[str], runs: Runs, warm_up_s: float, say: Callable[[str], None]
) -> list[Verdict]:
    """The policies on that load: of the whole trace, and after the warm-up (where it is so long)."""
    fleets = frontier(runs, say)
    rows = []
    for policy in policies:
        if policy == FIXED:
            rows.append(_yardstick(runs, fleets))
        else:
            replay = runs.simulator is in_replay
            code = sources(policy, replay=replay)
            maker, first = maker_of(load, policy, replay=replay)
            rows.append(runs.kept(policy, first, code, maker))
        say(f"{load.name}: {policy} keeps {rows[-1].share():.2%} at {rows[-1].gpu_hours():.2f} GPU-hours")
    return [verdict(load, row, fleets, since) for row in rows for since in _sinces(load, warm_up_s)]


def _sinces(load: Load, warm_up_s: float) -> tuple[int, ...]:
    """The windows from which a verdict counts."""
    warm = round(warm_up_s / WINDOW_S)
    return (0, warm) if warm and load.requests[-1].at_s > warm_up_s + WINDOW_S else (0,)


def verdict(load: Load, row: Row, fleets: Iterable[Row], since: int) -> Verdict:
    """That run against these fixed fleets, from that window on."""
    line = hull((fleet.gpu_hours(since), fleet.share(since)) for fleet in fleets)
    share, hours = row.share(since), row.gpu_hours(since)
    return Verdict(
        load.family,
        load.seed,
        row.policy,
        since * WINDOW_S,
        sum(row.came[since:]),
        share,
        hours,
        hours / max(1e-9, least_hours(line, share)) - 1,
        share - share_at(line, hours),
        share > line[-1][1],
        row.took_s,
    )


def _yardstick(runs: Runs, fleets: Sequence[Row]) -> Row:
    """The fixed fleet that somebody buys who knows the load, with a fifth more GPUs to be safe."""
    enough = [row for row in fleets if row.share() >= TARGET] or [max(fleets, key=Row.share)]
    fleet = min(enough, key=lambda row: (sum(row.fleet), -row.share())).fleet
    for _ in range(min(runs.load.cap, math.ceil(sum(fleet) * YARDSTICK)) - sum(fleet)):
        fleet = max(
            (runs.fixed(each) for each in ((fleet[0] + 1, fleet[1]), (fleet[0], fleet[1] + 1))), key=Row.share
        ).fleet
    return runs.fixed(fleet)


def maker_of(load: Load, policy: str, *, replay: bool = False) -> tuple[Maker, Fleet]:
    """The maker of that policy, and the fleet that it begins with. `replay`: for the engines of Dynamo's replay."""
    trial = trial_of(load)
    if policy == CLAIRVOYANT:
        engine = ENGINE if replay else None
        knows = clairvoyant(load.requests, slo_of(trial), load.start_up_s, load.speed, engine)
        return (lambda: knows), knows.start
    if policy in RIVALS:
        timing = Timing(ProfileModel.load(DEFAULT_PROFILE), load.speed)
        return partial(RIVALS[policy], slo_of(trial), timing), load.first
    if policy == "slo" and replay:
        return partial(slo, slo_of(trial), start_up_s=load.start_up_s, speed=load.speed), load.first
    return partial(_made, trial, policy), load.first


def _made(trial: Trial, policy: str) -> Policy[Any]:
    with TemporaryDirectory() as folder:
        options = planner_options(trial, policy, Path(folder))
        return policy_of(options, start_up_s=trial.start_up_s, speed=trial.speed)


def trial_of(load: Load) -> Trial:
    """The load as the contest of planners has it."""
    requests = Requests(load.name, list(load.requests))
    return Trial(load.name, lambda limit: requests, "", load.slo, load.start_up_s, load.cap, load.first, load.speed)


@lru_cache
def sources(policy: str, *, replay: bool = False) -> str:
    """The hash of the code that makes that policy's decisions: a run is made again where it has changed."""
    here = Path(__file__).parent
    clairvoyant = here.parent / "contest" / "clairvoyant.py"
    planner = sorted((Path(dynamo_local.__file__).parent / "planner").rglob("*.py"))
    files = planner if policy in PLANNERS else [clairvoyant, here / "rivals.py"]
    files += [clairvoyant.with_name("replay_policy.py")] if replay else []
    told = hashlib.sha256()
    for file in files:
        told.update(file.read_bytes())
    return told.hexdigest()[:16]


# --- one load after the other, in processes


@dataclass(frozen=True, slots=True)
class Task:
    """One load to be judged."""

    family: str
    seed: int
    hours: float | None
    policies: tuple[str, ...]
    folder: Path | None
    warm_up_s: float = WARM_UP_S
    verbose: bool = False
    replay: bool = False


def run_task(task: Task) -> list[Verdict]:
    """In a process of its own."""
    tell = say if task.verbose else lambda line: None
    load, folder = load_of(task.family, task.seed, task.hours), task.folder
    runs = Runs(load, folder / "replay" if folder and task.replay else folder, in_replay if task.replay else ours)
    return judged(load, task.policies, runs, task.warm_up_s, tell)


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


# --- tables


def table(verdicts: Sequence[Verdict]) -> str:
    """For people: losses first. Each row is a policy on a family."""
    lines = []
    for title, since in (("After the warm-up", True), ("The whole trace", False)):
        found = [each for each in verdicts if (each.since_s > 0) == since]
        if found:
            lines += [f"{title}:", *_rows(found), ""]
    return "\n".join(lines)


def _rows(verdicts: Sequence[Verdict]) -> Iterator[str]:
    heads = (
        "family",
        "policy",
        "loads",
        "share, median",
        "GPU-hours",
        "regret: worst",
        "median",
        "best",
        "gain: median",
    )
    rows = [(key, of) for key, of in by_family(verdicts).items()]
    rows += [((half, policy), of) for half in ("odd", "even") for policy, of in _half(verdicts, half).items()]
    rows.sort(key=lambda row: -max(each.regret for each in row[1]))
    yield "  ".join(f"{head:>14}" for head in heads)
    for (family, policy), of in rows:
        regrets = [each.regret for each in of]
        cells = (
            family,
            policy,
            str(len(of)),
            f"{median(each.share for each in of):.2%}",
            f"{median(each.gpu_hours for each in of):.2f}",
            *(f"{figure:+.1%}" for figure in (max(regrets), median(regrets), min(regrets))),
            f"{100 * median(each.gain for each in of):+.2f}",
        )
        yield "  ".join(f"{cell:>14}" for cell in cells)


def by_family(verdicts: Iterable[Verdict]) -> dict[tuple[str, str], list[Verdict]]:
    """Verdicts by family and policy."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for each in verdicts:
        found.setdefault((each.family, each.policy), []).append(each)
    return found


def _half(verdicts: Iterable[Verdict], half: str) -> Mapping[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for each in verdicts:
        if each.family in (ODD if half == "odd" else EVEN):
            found.setdefault(each.policy, []).append(each)
    return found


def as_json(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """For machines."""
    return [asdict(each) for each in verdicts]
