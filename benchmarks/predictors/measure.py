"""The comparison: each predictor continues each series from many points of it, and is timed in its real process."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.predictors.cases import Case, cases
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError
from dynamo_local.planner.forecasting.process import ForecastProcess
from dynamo_local.planner.predictors import answer, check_installed, forecast_task
from dynamo_local.planner.values import Forecasts, ForecastTask, Series
from dynamo_local.system.executors import process_pool

AHEAD = (1, 3)
"""How many windows ahead: the next one, and as far as a worker of three windows' start-up needs it."""
KNOWN_MIN = 10
"""Points before the first forecast, so that none of them stands on a fallback."""
ORIGINS, ORIGINS_SHORT = 40, 3
"""From how many points of a series it is continued, evenly apart."""
LENGTHS = (50, 200, 600)
"""Lengths of the series whose forecasts are timed."""
FITS, FITS_SHORT = 5, 1
DEADLINE_S = 120.0

CONTENDERS = {
    "constant": {"load_predictor": "constant"},
    "kalman": {"load_predictor": "kalman"},
    "kalman, log1p": {"load_predictor": "kalman", "load_predictor_log1p": True},
    "arima": {"load_predictor": "arima"},
    "prophet": {"load_predictor": "prophet"},
}


Told = tuple[tuple[float, ...], int]
"""The forecast values, and how many of the fits failed."""
Answers = Callable[[Iterable[ForecastTask]], Iterable[Told]]


@dataclass(frozen=True, slots=True)
class Error:
    """The mean absolute error of one predictor over one series, so many windows ahead. It is in the series' unit,
    and as a share of what `constant` has from the same points. `failed`: forecasts in which the last value stood in."""

    predictor: str
    case: str
    column: str
    ahead: int
    mae: float
    scaled: float
    failed: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of a forecast in its process: the first one with start and imports, later ones by the series' length
    (seconds, median), and the process's memory after them (MiB)."""

    predictor: str
    first_s: float
    fit_s: dict[str, float]
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was measured. `forecasts`: one window ahead on the first columns, for the plot; `absent`: predictors
    that are not installed, with the reason."""

    origins: int
    sources: dict[str, str]
    errors: list[Error]
    costs: list[Cost]
    absent: list[str]
    curves: dict[str, dict[str, list[float]]]

    def save(self, file: Path) -> None:
        """For `load`."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Facts:
        """The figures that `save` wrote."""
        raw = json.loads(file.read_text())
        errors, costs = raw.pop("errors"), raw.pop("costs")
        return cls(**raw, errors=[Error(**error) for error in errors], costs=[Cost(**cost) for cost in costs])


def measure(short: bool) -> Facts:
    """Some minutes with all predictors. Errors do not depend on the machine, so all of its cores work on them; what a
    forecast costs is measured afterwards, one at a time."""
    there: dict[str, PlannerConfig] = {}
    absent = []
    for name, words in CONTENDERS.items():
        try:
            check_installed(options := PlannerConfig(policy="sla", **words))
            there[name] = options
        except ConfigError as error:
            absent.append(str(error))
    origins = ORIGINS_SHORT if short else ORIGINS
    facts = Facts(origins, {}, [], [], absent, {})
    with process_pool() as pool:
        for case in cases(short):
            facts.sources[case.title] = f"{case.source}, windows of {case.window_s:g} s"
            facts.curves[case.title] = {}
            for column, series in case.columns.items():
                if len(set(series)) > 1:  # all equal: no predictor is asked
                    compare(facts, case, column, series, there, lambda tasks: pool.map(continued, tasks))
    facts.costs.extend(asyncio.run(_costs(there, FITS_SHORT if short else FITS)))
    return facts


def compare(
    facts: Facts,
    case: Case,
    column: str,
    series: Sequence[float],
    there: dict[str, PlannerConfig],
    answers: Answers,
) -> None:
    """Add the errors of all predictors on one series, and their forecasts of the number of requests."""
    begins = _origins(len(series), facts.origins)
    naive: dict[int, float] = {}
    for name, options in there.items():
        told = list(answers(_task(options, series[:begin], case.window_s) for begin in begins))
        for ahead in AHEAD:
            off = [
                abs(values[ahead - 1] - series[begin + ahead - 1])
                for begin, (values, _) in zip(begins, told, strict=True)
            ]
            mae = statistics.fmean(off)
            naive.setdefault(ahead, mae)  # constant comes first
            scaled = mae / naive[ahead] if naive[ahead] else 1.0
            failed = sum(failed for _, failed in told)
            facts.errors.append(Error(name, case.title, column, ahead, mae, scaled, failed))
        if column == "num_req":
            facts.curves[case.title][name] = [values[0] for values, _ in told]
            facts.curves[case.title]["at"] = [float(begin) for begin in begins]
            facts.curves[case.title]["seen"] = list(series)


def _origins(length: int, most: int) -> list[int]:
    """How many windows are known at each forecast: after them come all that it is compared with."""
    possible = range(KNOWN_MIN, length - max(AHEAD) + 1)
    count = min(most, len(possible))
    return [possible[round(index * (len(possible) - 1) / max(1, count - 1))] for index in range(count)]


def _task(options: PlannerConfig, series: Sequence[float], window_s: float) -> ForecastTask:
    """The task of one series alone."""
    task = forecast_task(options, Series(window_s), max(AHEAD))
    return ForecastTask(task.predictor, (tuple(series),), task.steps, window_s, task.options)


def continued(task: ForecastTask) -> Told:
    """The answer of one series."""
    told = answer(task)
    (values,) = told.values
    assert not isinstance(values, Missing), values.reason
    return values, len(told.notes)


async def _costs(there: dict[str, PlannerConfig], fits: int) -> list[Cost]:
    return [await _cost(name, options, fits) for name, options in there.items()]


async def _cost(name: str, options: PlannerConfig, fits: int) -> Cost:
    process = ForecastProcess()
    try:
        first_s = await _timed(process, _task(options, _bumpy(LENGTHS[0]), 180.0))
        fit_s = {}
        for length in LENGTHS:
            task = _task(options, _bumpy(length), 180.0)
            fit_s[str(length)] = statistics.median([await _timed(process, task) for _ in range(fits)])
        return Cost(name, first_s, fit_s, psutil.Process(process.pid).memory_info().rss / 2**20)
    finally:
        await process.close()


async def _timed(process: ForecastProcess, task: ForecastTask) -> float:
    began_s = time.perf_counter()
    told = await process.run(task, DEADLINE_S)
    took_s = time.perf_counter() - began_s
    if not isinstance(told, Forecasts):
        raise RuntimeError(told.reason)
    return took_s


def _bumpy(length: int) -> tuple[float, ...]:
    """A load that rises and falls, with jumps that repeat: any predictor has something to fit."""
    return tuple(_bumps(length))


def _bumps(length: int) -> Iterator[float]:
    for number in range(length):
        yield 200.0 + abs(number % 40 - 20) * 15.0 + (number * 7919 % 101)
