"""The plan of a chaos run: a pure function of its kind, its seed and its length, so that a seed replays the same plan.

`storms`: rounds of a *storm*, in which things are killed and stopped beside commands, and a *calm*, in which there are
commands alone: there nothing at all may fail. `steady`: a command every second, and every minute a worker dies; servers
and arbiter live, so their memory can be watched for hours. Which worker an action hits is drawn too (`unit`), among
those there are then.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

DECODE, PREFILL, PROCESSOR, FRONTEND = "VllmWorker", "PrefillWorker", "Processor", "Frontend"
BASE = {DECODE: 3, PREFILL: 2, PROCESSOR: 2}
"""Workers at the start, and again at the end."""
LIMITS = {DECODE: (2, 4), PREFILL: (1, 3), PROCESSOR: (1, 3)}
"""Numbers that are asked for in between; decode and prefill together stay within eight GPUs."""

STORM_S = 10.0
CALM_S = 13.0
GAP_S = 2.0
"""Between two actions, on average."""
LONG_S = 300.0
"""From this length on the manager dies more than once."""
COMMAND_EVERY_S, KILL_EVERY_S = 1.0, 60.0
"""Of a steady plan."""


class Kind(StrEnum):
    """The kinds of action."""

    KILL = "kill -9 of a worker"
    STOP = "SIGSTOP, later SIGCONT"
    HANG = "SIGSTOP for good"
    SPARE = "kill -9 of a spare"
    ETCD = "kill -9 of etcd"
    NATS = "kill -9 of NATS"
    STOP_ETCD = "SIGSTOP of etcd, later SIGCONT"
    STOP_NATS = "SIGSTOP of NATS, later SIGCONT"
    STOP_ARBITER = "SIGSTOP of the arbiter, later SIGCONT"
    DISK = "no room under the statefile and the logs"
    DESCRIPTORS = "no file descriptors for the arbiter"
    ADOPT = "kill -9 of the arbiter, then --adopt"
    SCALE = "scale"
    DRAIN = "drain"
    DRAIN_CANCEL = "drain, then --cancel"
    RESTART = "restart"
    ROLLING = "restart --rolling"
    FLIP = "flip"
    FLIP_CANCEL = "flip, then --cancel"
    SLEEP = "sleep"
    WAKE = "wake"


FAULTS = {
    **{Kind.KILL: 8, Kind.STOP: 4, Kind.HANG: 2, Kind.SPARE: 2, Kind.ETCD: 2, Kind.NATS: 2},
    **{Kind.STOP_ETCD: 2, Kind.STOP_NATS: 2, Kind.STOP_ARBITER: 1, Kind.DISK: 2, Kind.DESCRIPTORS: 1},
}
FOR_S = {
    Kind.STOP_ETCD: (0.5, 4.0),  # well within a lease's time to live
    Kind.STOP_NATS: (0.5, 4.0),
    Kind.STOP_ARBITER: (4.0, 10.0),  # at times for longer than a worker may be silent
    Kind.DISK: (0.5, 4.0),
    Kind.DESCRIPTORS: (0.5, 3.0),
}
"""How long, from and to, seconds."""
COMMANDS = {
    **{Kind.SCALE: 6, Kind.DRAIN: 3, Kind.DRAIN_CANCEL: 3, Kind.RESTART: 2, Kind.ROLLING: 1},
    **{Kind.FLIP: 4, Kind.FLIP_CANCEL: 1, Kind.SLEEP: 3, Kind.WAKE: 3},
}
OF_ENGINES = (Kind.FLIP, Kind.FLIP_CANCEL, Kind.SLEEP, Kind.WAKE)
"""A Processor has neither another role nor an engine that sleeps."""
PAUSES_S = {Kind.DRAIN_CANCEL: 0.6, Kind.FLIP_CANCEL: 0.1}
"""Until it is called back, at most: a flip takes a tenth of a second."""
VICTIMS = {DECODE: 5, PREFILL: 4, PROCESSOR: 3, FRONTEND: 1}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do `at_s` seconds after the start. `unit` (0..1) chooses the worker, `seconds` is its pause."""

    at_s: float
    kind: Kind
    component: str = ""
    unit: float = 0.0
    seconds: float = 0.0
    target: str = ""

    def __str__(self) -> str:
        words = [f"{self.at_s:7.2f} s  {self.kind}", self.component, self.target]
        return " ".join(word for word in words if word) + (f" ({self.seconds:.2f} s)" if self.seconds else "")


def storms_plan(seed: int, seconds: float) -> tuple[Action, ...]:
    """The plan of a run. Every kind of action is in it once a run is long enough for that."""
    rng = random.Random(seed)
    owed = [*FAULTS, *COMMANDS]
    rng.shuffle(owed)
    actions = []
    at_s = rng.uniform(1.0, 2.0)
    while at_s < seconds:
        storm = at_s % (STORM_S + CALM_S) < STORM_S
        kinds = {**FAULTS, **COMMANDS} if storm else COMMANDS
        due = [kind for kind in owed if kind in kinds]
        kind = due[0] if due and rng.random() < 0.75 else _drawn(rng, kinds)
        if kind in owed:
            owed.remove(kind)
        actions.append(_action(rng, at_s, kind))
        at_s += min(3 * GAP_S, rng.expovariate(1 / GAP_S)) + 0.05
    deaths = (0.5,) if seconds < LONG_S else (0.25, 0.5, 0.8)
    actions += [Action(seconds * (part + rng.uniform(-0.1, 0.1)), Kind.ADOPT) for part in deaths]
    return tuple(sorted(actions, key=lambda action: action.at_s))


def steady_plan(seed: int, seconds: float) -> tuple[Action, ...]:
    """A command every second, of each kind, and every minute a worker of those that do not face clients dies."""
    rng = random.Random(seed)
    kill_s = rng.uniform(0.0, KILL_EVERY_S)
    actions = [_action(rng, at_s, _drawn(rng, COMMANDS)) for at_s in _every(COMMAND_EVERY_S, rng.random(), seconds)]
    actions += [
        Action(at_s, Kind.KILL, rng.choice(list(BASE)), rng.random()) for at_s in _every(KILL_EVERY_S, kill_s, seconds)
    ]
    return tuple(sorted(actions, key=lambda action: action.at_s))


def _every(period_s: float, first_s: float, end_s: float) -> Iterator[float]:
    return itertools.takewhile(lambda at_s: at_s < end_s, itertools.count(first_s, period_s))


PLANS = {"storms": storms_plan, "steady": steady_plan}


def _drawn(rng: random.Random, weights: dict[Kind, int]) -> Kind:
    return rng.choices(list(weights), list(weights.values()))[0]


def _action(rng: random.Random, at_s: float, kind: Kind) -> Action:
    unit = rng.random()
    if kind in (Kind.ETCD, Kind.NATS, Kind.SPARE):
        return Action(at_s, kind, unit=unit)
    if kind in FOR_S:
        return Action(at_s, kind, seconds=rng.uniform(*FOR_S[kind]))
    if kind in (Kind.KILL, Kind.STOP, Kind.HANG):
        component = rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        return Action(at_s, kind, component, unit, rng.uniform(0.3, 2.5) if kind is Kind.STOP else 0.0)
    component = rng.choice((DECODE, PREFILL) if kind in OF_ENGINES else list(BASE))
    if kind is Kind.SCALE:
        least, most = LIMITS[component]
        target = rng.choice(["+1", "-1", f"={rng.randint(least, most)}"])
        return Action(at_s, kind, component, unit, target=target)
    return Action(at_s, kind, component, unit, rng.uniform(0.0, PAUSES_S[kind]) if kind in PAUSES_S else 0.0)
