"""Families of loads. A family and a seed give a load: the same requests and targets on every machine.

A family says how the rate and the lengths move. A seed draws the figures of it from wide ranges: level, size, gaps,
lengths, targets, start-up. Constants of a policy are chosen on the odd families and reported on the even ones, and then
the other way round. Recorded traces are one more family, which is in neither half.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from types import MappingProxyType

from benchmarks.contest.trials import TRIALS, Fleet
from benchmarks.traces import folder
from dynamo_local.core.routing.estimates import Timing
from dynamo_local.errors import BadInput
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.generator import GeneratorOptions, Prefixes
from dynamo_local.simulator.options import Slo
from dynamo_local.simulator.trace import TraceRequest, read_trace

CAP = 24
"""The budget of every policy, and the largest fixed fleet, in GPUs."""
HOURS = (2.5, 3.5)
"""A trace is that long unless its length is given. The first two hours are left out of the verdict."""
REQUESTS = (8_000, 20_000)
"""One simulation of so many takes 4 to 10 s on one core."""
PEAK_GPUS = (2.5, 8.0)
"""GPUs of work, fully used, at the rate that one of a hundred half-minutes exceeds."""
SPEEDS = (0.01, 4.0)
TAIL = 2.6
"""Lengths are cut at so many standard deviations of their logarithm: one of 200 is longer."""
ISL_MAX, OSL_MAX = 32_000, 4_000
TTFT_FACTORS, ITL_FACTORS = (1.2, 4.0), (1.3, 3.0)
"""Targets, as multiples of what the 95th percentile of the prompts takes alone, and of the gap of one stream."""
LONGEST_FACTOR = 1.05
"""The longest of 200 prompts keeps its target alone by so much, at the least."""
TTFT_MAX_S, ITL_MAX_S = 6.0, 0.12
"""Targets that would be longer make the engines faster, and the fleet smaller, down to the least peak."""
START_UPS_S = (15.0, 90.0)
SMOOTHED_S = 30
RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a load moves. Each sequence has one value for each second: the rate, in any unit, and factors on the median
    lengths (empty: 1). `isl_sigma`, `osl_sigma`, `weibull`: the spreads of lengths and the shape of the gaps, where the
    family is about them. `reuse`: the share of prompt tokens that an endless cache has."""

    rates: Sequence[float]
    isl: Sequence[float] = ()
    osl: Sequence[float] = ()
    isl_sigma: float | None = None
    osl_sigma: float | None = None
    weibull: float | None = None
    reuse: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and under what they are served. `speed`: the engine does so many times as much as its profile says.
    `first`: the fleet that a policy begins with. `likely`: where the search for the best fixed fleets begins.
    `start_up_s`: seconds from the order of a worker until it serves."""

    family: str
    seed: int
    requests: tuple[TraceRequest, ...]
    slo: Slo
    speed: float
    start_up_s: float
    first: Fleet
    likely: Fleet = (2, 2)
    cap: int = CAP

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.family} {self.seed}"


def log_uniform(rng: Random, low: float, high: float) -> float:
    """A number between the two, each ratio as likely as any other."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


# --- families
# Each draws its own figures. Lengths of time are seconds.


def _steady(rng: Random, seconds: int) -> Shape:
    """Nothing moves: a fixed fleet is right, and a policy can only lose."""
    return Shape([1.0] * seconds)


def _tails(rng: Random, seconds: int) -> Shape:
    """The rate stands still. Gaps (Weibull) and lengths have heavy tails."""
    sigmas = rng.uniform(0.9, 1.4), rng.uniform(0.8, 1.4)
    return Shape([1.0] * seconds, isl_sigma=sigmas[0], osl_sigma=sigmas[1], weibull=rng.uniform(0.35, 0.7))


def _lulls(rng: Random, seconds: int) -> Shape:
    """Bursts of minutes that come again at about the same height, with lulls of one to three minutes between them."""
    spread, low = rng.uniform(0.05, 0.3), rng.choice((0.0, rng.uniform(0.0, 0.15)))
    longest_s, rough = log_uniform(rng, 90, 900), rng.uniform(0.0, 0.4)
    rates: list[float] = []
    while len(rates) < seconds:
        height = rng.lognormvariate(0.0, spread)
        for _ in range(max(1, round(rng.uniform(45, longest_s) / 15))):
            rates += [height * rng.lognormvariate(0.0, rough)] * 15
        rates += [low] * round(rng.uniform(60, 180))
    return Shape(rates[:seconds])


def _flash(rng: Random, seconds: int) -> Shape:
    """A calm rate, and now and then a crowd: up within a minute, and gone again within some more."""
    rates = list(_swing_of(rng, seconds, rng.uniform(0.0, 0.3), log_uniform(rng, 1800, 7200)))
    between_s, at_s = log_uniform(rng, 1200, 4800), rng.uniform(300, 2400)
    while at_s < seconds:
        height, rise_s, fall_s = log_uniform(rng, 1.0, 6.0), rng.uniform(1, 60), log_uniform(rng, 60, 900)
        for second in range(int(at_s), min(seconds, int(at_s + 6 * fall_s))):
            since_s = second - at_s
            rates[second] += height * min(1.0, since_s / rise_s) * math.exp(-max(0.0, since_s - rise_s) / fall_s)
        at_s += 120 + rng.expovariate(1 / between_s)
    return Shape(rates)


def _swing(rng: Random, seconds: int) -> Shape:
    """A wave, as days are, in a shorter time."""
    return Shape(_swing_of(rng, seconds, rng.uniform(0.3, 0.95), log_uniform(rng, 400, 9000)))


def _swing_of(rng: Random, seconds: int, amplitude: float, period_s: float) -> Sequence[float]:
    phase, sharp = rng.uniform(0, 2 * math.pi), rng.uniform(1.0, 2.5)
    waves = (0.5 + 0.5 * math.sin(phase + 2 * math.pi * second / period_s) for second in range(seconds))
    return [1 - amplitude + 2 * amplitude * wave**sharp for wave in waves]


def _steps(rng: Random, seconds: int) -> Shape:
    """Levels that change at once."""
    longest_s, ratio = log_uniform(rng, 400, 3600), rng.uniform(2.0, 8.0)
    rates: list[float] = []
    while len(rates) < seconds:
        rates += [log_uniform(rng, 1.0, ratio)] * round(rng.uniform(120, longest_s))
    return Shape(rates[:seconds])


def _ramps(rng: Random, seconds: int) -> Shape:
    """Straight lines from level to level, some of them falls at once."""
    longest_s, ratio, level = log_uniform(rng, 900, 5400), rng.uniform(2.0, 10.0), 1.0
    rates: list[float] = []
    while len(rates) < seconds:
        after, lasts = log_uniform(rng, 1.0, ratio), round(rng.uniform(300, longest_s))
        rates += [level + (after - level) * second / lasts for second in range(lasts)]
        level = log_uniform(rng, 1.0, ratio) if rng.random() < 0.25 else after
    return Shape(rates[:seconds])


def _weekends(rng: Random, seconds: int) -> Shape:
    """Days of minutes: five with a peak that is about the same, two that are calm."""
    day_s, calm, noise = log_uniform(rng, 500, 2000), rng.uniform(0.1, 0.6), rng.uniform(0.02, 0.25)
    night, sharp, first = rng.uniform(0.05, 0.5), rng.uniform(0.7, 3.0), rng.randrange(7)
    rates: list[float] = []
    for number in range(int(seconds / day_s) + 1):
        height = rng.lognormvariate(0.0, noise) * (calm if (first + number) % 7 >= 5 else 1.0)
        for second in range(round(day_s)):
            rates.append(night * calm + height * (0.5 - 0.5 * math.cos(2 * math.pi * second / day_s)) ** sharp)
    return Shape(rates[:seconds])


def _drift(rng: Random, seconds: int) -> Shape:
    """Lengths drift slowly, prompts and answers apart. The rate moves a little."""
    rates = _swing_of(rng, seconds, rng.uniform(0.0, 0.4), log_uniform(rng, 1200, 7200))
    return Shape(rates, isl=_wandering(rng, seconds, 0.5, 3600.0), osl=_wandering(rng, seconds, 0.5, 3600.0))


def _correlated(rng: Random, seconds: int) -> Shape:
    """Lengths go up or down with the rate."""
    rates = _wandering(rng, seconds, rng.uniform(0.3, 0.7), log_uniform(rng, 300, 2400))
    isl, osl = rng.uniform(-0.8, 0.8), rng.uniform(-0.8, 0.8)
    return Shape(rates, isl=[rate**isl for rate in rates], osl=[rate**osl for rate in rates])


def _wander(rng: Random, seconds: int) -> Shape:
    """The rate wanders without a pattern, in minutes and in hours at once."""
    slow = _wandering(rng, seconds, rng.uniform(0.3, 0.7), log_uniform(rng, 1500, 6000))
    quick = _wandering(rng, seconds, rng.uniform(0.1, 0.5), log_uniform(rng, 60, 600))
    return Shape([one * other for one, other in zip(slow, quick, strict=True)])


def _wandering(rng: Random, seconds: int, sigma: float, memory_s: float) -> list[float]:
    """Factors around 1 whose logarithm has this standard deviation and forgets within `memory_s`."""
    keeps = math.exp(-10 / memory_s)
    fresh = sigma * math.sqrt(1 - keeps * keeps)
    value, found = rng.gauss(0.0, sigma), list[float]()
    while len(found) < seconds:
        found += [math.exp(value)] * 10
        value = keeps * value + rng.gauss(0.0, fresh)
    return found[:seconds]


def _prefixes(rng: Random, seconds: int) -> Shape:
    """Conversations that go on and prompts with common beginnings, on a wave."""
    rates = _swing_of(rng, seconds, rng.uniform(0.2, 0.8), log_uniform(rng, 900, 7200))
    return Shape(rates, isl_sigma=rng.uniform(0.7, 1.0), reuse=rng.uniform(0.2, 0.6))


FAMILIES: Mapping[str, Callable[[Random, int], Shape]] = MappingProxyType(
    {
        "steady": _steady,
        "tails": _tails,
        "lulls": _lulls,
        "flash": _flash,
        "swing": _swing,
        "steps": _steps,
        "ramps": _ramps,
        "weekends": _weekends,
        "drift": _drift,
        "correlated": _correlated,
        "wander": _wander,
        "prefixes": _prefixes,
    }
)
ODD, EVEN = tuple(FAMILIES)[::2], tuple(FAMILIES)[1::2]
"""The first, third, fifth, …, and the others."""


# --- requests


@dataclass(frozen=True, slots=True)
class Lengths:
    """Median tokens of prompts and answers, and the standard deviations of their logarithms."""

    isl: float
    osl: float
    isl_sigma: float
    osl_sigma: float

    @property
    def isl_max(self) -> int:
        """Longer prompts are cut to this."""
        return min(ISL_MAX, round(self.isl * math.exp(TAIL * self.isl_sigma)))

    @property
    def osl_max(self) -> int:
        """Longer answers are cut to this."""
        return min(OSL_MAX, max(2, round(self.osl * math.exp(TAIL * self.osl_sigma))))


def requests_of(family: str, seed: int, hours: float | None = None) -> tuple[TraceRequest, ...]:
    """The requests of a load, by time, the first at 0 s. Pure. Raises `BadInput` for an unknown family."""
    if family not in FAMILIES:
        raise BadInput(f"no family of loads is called {family}; there are {', '.join((*FAMILIES, RECORDED))}")
    rng = Random(f"{family}/{seed}")
    drawn_hours = rng.uniform(*HOURS)
    seconds = round((hours or drawn_hours) * 3600)
    number = round(log_uniform(rng, *REQUESTS) * seconds / (drawn_hours * 3600))
    burstiness, heavy = rng.uniform(0.5, 1.6), rng.random() < 0.5
    lengths = (log_uniform(rng, 2000, 12000), log_uniform(rng, 20, 200), rng.uniform(0.1, 0.7), rng.uniform(0.2, 0.8))
    shape = FAMILIES[family](rng, seconds)
    of = Lengths(*lengths[:2], shape.isl_sigma or lengths[2], shape.osl_sigma or lengths[3])
    gaps = _gaps(Random(f"{family}/{seed}/gaps"), shape.weibull, burstiness, heavy=heavy)
    times = _times(shape.rates, number, gaps)
    return tuple(_requests(times, shape, of, Random(f"{family}/{seed}/lengths"), seed))


def _gaps(rng: Random, weibull: float | None, burstiness: float, *, heavy: bool) -> Iterator[float]:
    """Gaps with a mean of 1, without end: Weibull of that shape, or of 1 ÷ burstiness where `heavy`, else Gamma with
    a coefficient of variation of `burstiness`."""
    if weibull is not None or heavy:
        form = weibull or 1 / burstiness
        scale = 1 / math.gamma(1 + 1 / form)
        while True:
            yield rng.weibullvariate(scale, form)
    while True:
        yield rng.gammavariate(1 / burstiness**2, burstiness**2)


def _times(rates: Sequence[float], number: int, gaps: Iterator[float]) -> list[float]:
    """About so many moments (s), the first at 0. Gaps last until the rate has promised so many requests."""
    total = math.fsum(rates)
    promised = [*accumulate((rate * number / total for rate in rates), initial=0.0)]
    found, expected = list[float](), 0.0
    while expected < promised[-1]:
        second = bisect_left(promised, expected, lo=1) - 1
        within = (expected - promised[second]) / (promised[second + 1] - promised[second])
        found.append(round(second + within, 3))
        expected += next(gaps)
    return [at_s - found[0] for at_s in found]


def _requests(times: Sequence[float], shape: Shape, of: Lengths, rng: Random, seed: int) -> Iterator[TraceRequest]:
    prefixes = _prefixes_of(shape, of, rng, seed) if shape.reuse else None
    for at_s in times:
        second = min(int(at_s), len(shape.rates) - 1)
        isl = of.isl * (shape.isl[second] if shape.isl else 1.0) * rng.lognormvariate(0.0, of.isl_sigma)
        osl = of.osl * (shape.osl[second] if shape.osl else 1.0) * rng.lognormvariate(0.0, of.osl_sigma)
        tokens = max(8, min(of.isl_max, round(isl))), max(2, min(of.osl_max, round(osl)))
        yield TraceRequest(at_s, *tokens, prefixes.ids_of(at_s, *tokens) if prefixes else ())


def _prefixes_of(shape: Shape, of: Lengths, rng: Random, seed: int) -> Prefixes:
    options = GeneratorOptions(
        seed=seed,
        rate=1.0,
        cv=1.0,
        isl=round(of.isl),
        isl_sigma=of.isl_sigma,
        isl_max=of.isl_max,
        osl=round(of.osl),
        osl_sigma=of.osl_sigma,
        osl_max=of.osl_max,
        reuse=shape.reuse,
        think=log_uniform(rng, 20, 200),
        system=512 * rng.randrange(0, 5),
        systems=rng.randrange(1, 9),
    )
    return Prefixes(options, rng)


# --- loads


def load_of(family: str, seed: int, hours: float | None = None) -> Load:
    """The load of that family and seed. `hours` is the length of the trace (None: drawn).

    The seed names one of the recorded traces, by its place in the list. Raises `BadInput`.
    """
    if family == RECORDED:
        return _recorded(seed)
    return _served(family, seed, requests_of(family, seed, hours))


def recorded() -> list[Path]:
    """The recorded traces that are to be had, by name. Raises `BadInput`."""
    return sorted(folder(os.environ).glob("*.jsonl.gz"))


def _recorded(seed: int) -> Load:
    files = recorded()
    if seed >= len(files):
        raise BadInput(f"there is no recorded trace {seed}: {len(files)} are in {folder(os.environ)}")
    rows = tuple(read_trace(files[seed]))
    for trial in TRIALS:
        if trial.file == files[seed].name:
            settings = (trial.slo, trial.speed, trial.start_up_s, trial.first, trial.first, trial.cap)
            return Load(RECORDED, seed, rows, *settings)
    return _served(RECORDED, seed, rows)


def _served(family: str, seed: int, requests: tuple[TraceRequest, ...]) -> Load:
    """Targets that one request alone keeps, and engines so fast that the peak takes the drawn number of GPUs."""
    rng = Random(f"{family}/{seed}/served")
    timing = _timing()
    prompts = sorted(each.input_length for each in requests)
    long_s, longest_s = (timing.prefill_s(prompts[int(part * (len(prompts) - 1))]) for part in (0.95, 0.995))
    context = sum(each.input_length + each.output_length / 2 for each in requests) / len(requests)
    alone_s = timing.itl_s(1, round(context))
    ttft_s = max(log_uniform(rng, *TTFT_FACTORS) * long_s, LONGEST_FACTOR * longest_s)
    itl_s = log_uniform(rng, *ITL_FACTORS) * alone_s
    streams = max((n for n in range(1, 257) if timing.itl_s(n, round(n * context)) <= itl_s), default=1)
    stream_s = itl_s / streams
    work = [timing.prefill_s(each.input_length) + each.output_length * stream_s for each in requests]
    within = [0.0] * (int(requests[-1].at_s / SMOOTHED_S) + 1)
    for each, gpu_s in zip(requests, work, strict=True):
        within[int(each.at_s / SMOOTHED_S)] += gpu_s / SMOOTHED_S
    peak = sorted(within)[int(0.99 * (len(within) - 1))]
    gpus = max(PEAK_GPUS[0], min(log_uniform(rng, *PEAK_GPUS), peak * TTFT_MAX_S / ttft_s, peak * ITL_MAX_S / itl_s))
    speed = min(SPEEDS[1], max(SPEEDS[0], peak / gpus))
    prefills = math.fsum(timing.prefill_s(each.input_length) for each in requests) / math.fsum(work)
    likely = max(1, round(gpus * prefills)), max(1, round(gpus * (1 - prefills)))
    return Load(
        family,
        seed,
        requests,
        Slo(round(ttft_s * 1000 / speed, 1), round(itl_s * 1000 / speed, 1)),
        round(speed, 4),
        round(rng.uniform(*START_UPS_S), 1),
        (rng.randrange(1, 4), rng.randrange(1, 4)),
        likely,
    )


@lru_cache(1)
def _timing() -> Timing:
    return Timing(ProfileModel.load(DEFAULT_PROFILE))
