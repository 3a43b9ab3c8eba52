"""A question to the queueing model as a `ForecastTask`, which the process that forecasts can answer, and its answer.

The series are gaps, ISL and OSL of each demand, then the rates, and last times, ISL and OSL of a recorded past, if it
is to be judged. The answer has the shares of prefill and of decode for each rate and demand, each for 0, 1, 2, …
workers. Then come the requests of the past in each interval, and those that each number of workers would have missed.
If the past is `turned`, the same follows for the other shape of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError
from dynamo_local.planner.queueing import Demand, Engine, EngineOptions, Evaluator, Misses, Passes, Past, Shares
from dynamo_local.planner.values import Forecasts, ForecastTask
from dynamo_local.profile.interpolation import ProfileModel

NAME = "queueing"
GRID = math.log(1.08)
"""Rates are looked at in steps of 8 %: nearer ones are the same question again, and its answer is known."""
RATE_MIN = 0.02
EVALUATORS = 6
PROMPTS_MAX = 16384
PAST_OPTIONS = ("judged_from_s", "bin_s", "bins", "turned")
PAST_DECODE_FACTOR = "past_decode_factor"


@dataclass(frozen=True, slots=True)
class Question:
    """Which share of these demands keeps both targets, at these rates (requests/s), with up to so many workers.
    `profile` is a profile's name or folder; `speed`: the engine does so many times as much."""

    profile: str
    ttft_s: float
    itl_s: float
    workers_max: int
    rates: tuple[float, ...]
    demands: tuple[Demand, ...]
    engine: EngineOptions
    speed: float = 1.0
    past: Past | None = None

    def task(self) -> ForecastTask:
        """The question as what a forecasting process is asked."""
        columns = tuple(column for each in self.demands for column in (each.gaps, each.isl, each.osl))
        options = {
            "profile": self.profile,
            "ttft_s": self.ttft_s,
            "itl_s": self.itl_s,
            "speed": self.speed,
            **asdict(self.engine),
        }
        series = (*columns, self.rates)
        if self.past is not None:
            past = self.past
            series = (*series, past.times, past.isl, past.osl)
            options |= {name: getattr(past, name) for name in PAST_OPTIONS}
            options[PAST_DECODE_FACTOR] = past.decode_factor
        return ForecastTask(NAME, series, self.workers_max, 1.0, tuple(options.items()))


def on_grid(rate: float) -> float:
    """The rate for which the question is asked in place of this one."""
    return math.exp(round(math.log(max(rate, RATE_MIN)) / GRID) * GRID)


def shares_of(
    reported: Forecasts | Missing | None, rates: int, demands: int
) -> tuple[tuple[Shares, ...], ...] | Missing:
    """For each rate, the shares of each demand. `Missing` where there is no answer to that question."""
    if reported is None:
        return Missing("nobody was asked")
    if isinstance(reported, Missing):
        return reported
    rows = iter(reported.values)
    found = []
    for _ in range(rates):
        found.append(tuple(pair for _ in range(demands) if (pair := _pair(rows)) is not None))
    if any(len(each) < demands for each in found):
        missing = next(
            (value.reason for value in reported.values if isinstance(value, Missing)), "the answer is too short"
        )
        return Missing(missing)
    return tuple(found)


def misses_of(reported: Forecasts | Missing | None, workers_max: int, past: Past) -> tuple[Misses, ...]:
    """The requests of that past that each number of workers would have missed: in the graph's own shape, and in the
    other one if the past is `turned`. Empty: no answer."""
    shapes, size = 2 if past.turned else 1, 2 * workers_max + 3
    rows = () if reported is None or isinstance(reported, Missing) else reported.values[-shapes * size :]
    found = [tuple(map(int, row)) for row in rows if not isinstance(row, Missing)]
    if len(found) < shapes * size or any(len(row) != past.bins for row in found):
        return ()
    parts = [found[first : first + size] for first in range(0, shapes * size, size)]
    return tuple(Misses(each[0], tuple(each[1 : workers_max + 2]), tuple(each[workers_max + 2 :])) for each in parts)


def _pair(rows: Iterator[tuple[float, ...] | Missing]) -> Shares | None:
    prefill, decode = next(rows, None), next(rows, None)
    if prefill is None or decode is None or isinstance(prefill, Missing) or isinstance(decode, Missing):
        return None
    return Shares(prefill, decode)


def answer(task: ForecastTask) -> Forecasts:
    """The shares, here and now: milliseconds for each that is not remembered. `Missing` without its profile."""
    options = dict(task.options)
    series, past, decode_factor = list(task.series), None, 1.0
    if "bins" in options:
        *series, times, isl, osl = task.series
        judged_from_s, bin_s, bins, turned = (float(options.pop(name)) for name in PAST_OPTIONS)
        decode_factor = float(options.pop(PAST_DECODE_FACTOR))
        past = Past(times, _whole(isl), _whole(osl), judged_from_s, bin_s, int(bins), bool(turned), decode_factor)
    try:
        evaluator = _evaluator(tuple(sorted(options.items())))
    except ConfigError as error:
        return Forecasts((Missing(str(error)),))
    *columns, rates = series
    demands = [_demand(columns[first : first + 3]) for first in range(0, len(columns), 3)]
    values: list[tuple[float, ...] | Missing] = []
    for rate in rates:
        for demand in demands:
            found = evaluator.shares(demand, hash(demand), rate, task.steps)
            values += [found.prefill, found.decode]
    if past is not None:
        options["decode_factor"] = decode_factor
        judges = [_evaluator(tuple(sorted(options.items())))]
        if past.turned:
            options["mixed"] = not options["mixed"]
            judges.append(_evaluator(tuple(sorted(options.items()))))
        for judge in judges:
            missed = judge.misses(past, task.steps)
            values += [missed.requests, *missed.prefill, *missed.decode]
    return Forecasts(tuple(values))


def _demand(columns: Sequence[Sequence[float]]) -> Demand:
    gaps, isl, osl = columns
    return Demand(tuple(gaps), _whole(isl), _whole(osl))


def _whole(values: Sequence[float]) -> tuple[int, ...]:
    return tuple(int(each) for each in values)


@lru_cache(maxsize=EVALUATORS)
def _evaluator(options: tuple[tuple[str, Any], ...]) -> Evaluator:
    named: Mapping[str, Any] = dict(options)
    engine = EngineOptions(**{name: type(value)(named[name]) for name, value in asdict(EngineOptions()).items()})
    return Evaluator(
        Engine(_Faster(ProfileModel.load(str(named["profile"])), float(named["speed"])), engine),
        float(named["ttft_s"]),
        float(named["itl_s"]),
    )


@dataclass(frozen=True, slots=True)
class _Faster:
    """A profile's engine, so many times as fast. Prompt times are cached: the arbiter's loop asks for the
    same ones at each decision."""

    profile: ProfileModel
    speed: float
    _known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def max_kv_tokens(self) -> int:
        return self.profile.max_kv_tokens

    def ttft_s(self, prompt_tokens: int) -> float:
        known = self._known.get(prompt_tokens)
        if known is None:
            if len(self._known) >= PROMPTS_MAX:
                self._known.clear()
            known = self._known[prompt_tokens] = self.profile.ttft_s(prompt_tokens) / self.speed
        return known

    def itl_s(self, active_kv_tokens: int, mean_context: float) -> float:
        return self.profile.itl_s(active_kv_tokens, mean_context) / self.speed


def passes_of(profile: str, speed: float = 1.0) -> Passes:
    """An engine with that profile, `speed` times as fast. Raises `ConfigError`."""
    return _Faster(ProfileModel.load(profile), speed)
