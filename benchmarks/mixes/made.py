"""Mixes of models, and their requests: made ones, and recorded ones at different phases.

A family, a number of models and a seed give a mix: the same models, targets, switching costs and requests on every
machine. Constants of the decision are chosen on odd seeds and reported on even ones, and then the other way round.

The load factor is the GPU time that the requests need in full batches, divided by that of all GPUs. Each request has a
mark; a lower load factor leaves out those with a high mark, so the times at which a model is busy stay the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from types import MappingProxyType

from benchmarks.traces import folder
from dynamo_local.simulator.mix import Engine, Mix, Request
from dynamo_local.simulator.trace import read_trace

LENGTH_S = 1500
WARM_UP_S = 300
"""Requests of the first so many seconds are served and not judged: our policy has measured nothing before."""
LOAD_MAX = 1.0
"""Requests are made for this load factor: all GPUs are in full use all the time."""
PARKED_COPIES = 3
"""Main memory holds so many times what all GPUs hold. That bounds the workers that can sleep."""
TTFTS_S = (1.5, 6.0)
"""The time to the first token that is allowed beyond four typical prefills."""
RECORDED = "recorded"
SIZES = MappingProxyType({"2 on 1": (2, 1), "3 on 2": (3, 2), "3 on 8": (3, 8), "6 on 8": (6, 8), "12 on 8": (12, 8)})
"""Models and GPUs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Ranges from which a seed draws engines: GPUs of a worker, slots, passes, weights' times to come and go."""

    gpus: int
    slots: tuple[int, int]
    alone_s: tuple[float, float]
    wake_s: tuple[float, float]
    start_s: tuple[float, float]


KINDS = (
    (0.45, Kind(1, (10, 18), (0.008, 0.014), (0.5, 1.5), (10.0, 20.0))),
    (0.35, Kind(1, (6, 12), (0.014, 0.024), (1.0, 3.0), (15.0, 40.0))),
    (0.15, Kind(2, (10, 18), (0.018, 0.028), (2.0, 5.0), (30.0, 60.0))),
    (0.05, Kind(4, (12, 24), (0.018, 0.028), (2.0, 5.0), (30.0, 60.0))),
)
"""Small, medium, large and huge models, as shares of the models that are drawn."""


@dataclass(frozen=True, slots=True)
class Marked(Request):
    """`mark` is between 0 and 1: the request is part of every load factor ÷ `LOAD_MAX` above it."""

    mark: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeMix(Mix):
    """A mix with all its requests by time."""

    family: str
    size: str
    seed: int
    requests: tuple[Marked, ...] = field(repr=False)

    def at(self, load: float) -> list[Marked]:
        """The requests at that load factor."""
        most = load / LOAD_MAX
        return [each for each in self.requests if each.mark < most]


Rates = Callable[[Random, int, float], list[list[float]]]
"""Makes a rate (any unit) for each second of each model."""


def _phases(rng: Random, models: int, length_s: float) -> list[list[float]]:
    """Each model has its day: its own period, phase, height and level."""
    found = []
    for _ in range(models):
        period, phase = rng.uniform(0.4, 1.0) * length_s, rng.uniform(0, 2 * math.pi)
        level, power = math.exp(rng.gauss(0, 0.5)), rng.uniform(1, 3)
        curve = [(0.5 + 0.5 * math.sin(2 * math.pi * t / period + phase)) ** power for t in range(int(length_s))]
        found.append([level * (0.03 + each) for each in curve])
    return found


def _bursts(rng: Random, models: int, length_s: float) -> list[list[float]]:
    """Each model is on for a while, and then off for three to eight times as long."""
    found = []
    for _ in range(models):
        on_s, ratio, level = math.exp(rng.uniform(*map(math.log, (30, 150)))), rng.uniform(3, 8), rng.uniform(0.5, 1.5)
        rate = list[float]()
        busy = rng.random() < 1 / (1 + ratio)
        while len(rate) < length_s:
            mean = on_s if busy else on_s * ratio
            height = level * math.exp(rng.gauss(0, 0.3)) if busy else 0.0
            rate += [height] * max(1, round(min(0.4 * length_s, rng.expovariate(1 / mean))))
            busy = not busy
        found.append(rate[: int(length_s)])
    return found


def _zipf(rng: Random, models: int, length_s: float) -> list[list[float]]:
    """Steady rates; the popularity falls with the rank."""
    power = rng.uniform(0.9, 1.6)
    ranks = [*range(1, models + 1)]
    rng.shuffle(ranks)
    return [[rank**-power] * int(length_s) for rank in ranks]


def _hot(rng: Random, models: int, length_s: float) -> list[list[float]]:
    """One model has most of the requests. The others have sessions: a few requests, and long nothing."""
    period, phase = rng.uniform(0.5, 1.0) * length_s, rng.uniform(0, 2 * math.pi)
    found = [[1 + 0.4 * math.sin(2 * math.pi * t / period + phase) for t in range(int(length_s))]]
    cold = rng.uniform(0.15, 0.4) / max(1, models - 1)
    for _ in range(models - 1):
        session_s, pause_s, rate = rng.uniform(10, 40), rng.uniform(60, 300), [0.0] * int(length_s)
        at_s = rng.expovariate(1 / pause_s)
        while at_s < length_s:
            for second in range(int(at_s), min(int(length_s), int(at_s + session_s))):
                rate[second] = cold * (session_s + pause_s) / session_s
            at_s += session_s + rng.expovariate(1 / pause_s)
        found.append(rate)
    rng.shuffle(found)
    return found


FAMILIES: Mapping[str, Rates] = MappingProxyType({"phases": _phases, "bursts": _bursts, "zipf": _zipf, "hot": _hot})


def mix_of(family: str, size: str, seed: int) -> MadeMix:
    """The mix of that family, size and seed. ValueError: recorded traces are not here."""
    models, gpus = SIZES[size]
    rng = Random(f"{family}/{size}/{seed}")
    engines = tuple(_engine(rng, models, gpus) for _ in range(models))
    made = _recorded(rng, engines) if family == RECORDED else _made(rng, FAMILIES[family], engines, gpus)
    return MadeMix(
        family=family,
        size=size,
        seed=seed,
        gpus=gpus,
        engines=engines,
        length_s=LENGTH_S,
        warm_up_s=WARM_UP_S,
        requests=tuple(_scaled(made, engines, gpus, rng)),
    )


def _engine(rng: Random, models: int, gpus: int) -> Engine:
    kinds = [(share, kind) for share, kind in KINDS if kind.gpus <= max(1, gpus // 2)]
    kind = rng.choices([each for _, each in kinds], [share for share, _ in kinds])[0]
    slots, alone_s, slower = rng.randint(*kind.slots), rng.uniform(*kind.alone_s), rng.uniform(2.0, 3.5)
    prefill_s = alone_s / rng.uniform(100, 250)
    return Engine(
        gpus=kind.gpus,
        slots=slots,
        prefill_s=prefill_s,
        alone_s=alone_s,
        grows=slots / (slower - 1),
        ttft_s=4 * 1000 * prefill_s + math.exp(rng.uniform(*map(math.log, TTFTS_S))),
        itl_s=alone_s * slower,
        start_s=rng.uniform(*kind.start_s),
        wake_s=rng.uniform(*kind.wake_s),
        sleep_s=rng.uniform(0.5, 1.0),
        parked=max(1, PARKED_COPIES * gpus // (models * kind.gpus)),
    )


def _made(rng: Random, rates: Rates, engines: Sequence[Engine], gpus: int) -> Iterator[tuple[float, int, int, int]]:
    """Too many requests: those beyond `LOAD_MAX` are left out later. Time (s), model, prompt and output lengths."""
    shapes = rates(rng, len(engines), LENGTH_S)
    works = [rng.uniform(0.7, 1.4) * sum(rate) for rate in shapes]
    total = sum(works)
    for model, (engine, rate) in enumerate(zip(engines, shapes, strict=True)):
        isl, osl = math.exp(rng.uniform(*map(math.log, (300, 2000)))), rng.uniform(100, 300)
        busy_gpus = engine.busy_s(isl, osl) * engine.gpus / engine.slots
        wanted = works[model] / total * LENGTH_S * gpus * SPARE / busy_gpus
        peak = max(rate) or 1.0
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(wanted / max(1e-9, sum(rate)) * peak)) < LENGTH_S:
            if rng.random() * peak < rate[int(at_s)]:
                yield at_s, model, *_lengths(rng, isl, osl)


SPARE = 1.3
"""Requests are drawn for so many times the GPUs, and then thinned to the load factor."""


def _lengths(rng: Random, isl: float, osl: float) -> tuple[int, int]:
    prompt, answer = rng.lognormvariate(math.log(isl), 0.6), rng.lognormvariate(math.log(osl), 0.6)
    return max(8, min(8000, round(prompt))), max(2, min(1500, round(answer)))


def recorded() -> list[Path]:
    """The recorded traces that are to be had, by name."""
    return sorted(folder(os.environ).glob("*.jsonl.gz"))


@lru_cache
def _rows(file: Path) -> tuple[tuple[float, int, int], ...]:
    return tuple((each.at_s, each.input_length, each.output_length) for each in read_trace(file))


def _recorded(rng: Random, engines: Sequence[Engine]) -> Iterator[tuple[float, int, int, int]]:
    """Each model has a recorded trace that begins elsewhere, and runs up to four times as fast."""
    files = recorded()
    if not files:
        raise ValueError("no recorded traces are here")
    for model in range(len(engines)):
        rows = _rows(rng.choice(files))
        length_s, faster, phase = rows[-1][0] + 1.0, rng.uniform(1, 4), rng.random()
        share = math.exp(rng.gauss(0, 0.8)) / 3
        for round_ in range(math.ceil(LENGTH_S * faster / length_s) + 1):
            for at_s, isl, osl in rows:
                moment = (at_s + (round_ - phase) * length_s) / faster
                if 0 <= moment < LENGTH_S and rng.random() < share:
                    yield moment, model, min(8000, max(8, isl)), max(2, min(1500, osl))


def _scaled(
    made: Iterator[tuple[float, int, int, int]], engines: Sequence[Engine], gpus: int, rng: Random
) -> Iterator[Marked]:
    """Requests by time, with marks that make their load `LOAD_MAX` at the mark 1."""
    rows = sorted(made)
    work = sum(
        engines[model].busy_s(isl, osl) * engines[model].gpus / engines[model].slots for _, model, isl, osl in rows
    )
    over = work / (gpus * LENGTH_S * LOAD_MAX)
    for at_s, model, isl, osl in rows:
        mark = rng.random() * over
        if mark < 1.0:
            yield Marked(at_s, model, isl, osl, mark)
