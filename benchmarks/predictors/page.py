"""The tables and the plot of docs/predictors.md, and the figures for `python -m benchmarks`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, machine, machine_line, number
from benchmarks.measured_pages import write_measured
from benchmarks.predictors.measure import AHEAD, KNOWN_MIN, Error, Facts

PAGE = Path(__file__).parents[2] / "docs" / "predictors.md"
COMMAND = "python -m benchmarks.predictors --page"
COLORS = {
    "constant": "tab:gray",
    "kalman": "tab:green",
    "kalman, log1p": "tab:olive",
    "arima": "tab:blue",
    "prophet": "tab:orange",
}


def write(page: Path, facts: Facts) -> None:
    """Replace what stands between the page's two marks, and draw `predictors.png` beside it."""
    write_measured(page, COMMAND, section(facts))
    draw(facts, page.with_suffix(".png"))


def report(facts: Facts) -> Report:
    """Errors as a share of `constant`'s, and times."""
    told = Report("predictors")
    for predictor in _predictors(facts):
        for ahead in AHEAD:
            told.add(f"{predictor}: error {ahead} ahead, of constant's", "", [_overall(facts, predictor, ahead)])
    for cost in facts.costs:
        told.add(f"{cost.predictor}: first forecast, with start and imports", "s", [cost.first_s])
        for length, fit_s in cost.fit_s.items():
            told.add(f"{cost.predictor}: a forecast of {length} windows", "ms", [fit_s * 1e3])
        told.add(f"{cost.predictor}: memory of its process", "MiB", [cost.memory_mib])
    told.notes.extend(f"{title}: {source}" for title, source in facts.sources.items())
    told.notes.extend(facts.absent)
    return told


def section(facts: Facts) -> str:
    """The measured figures, as markdown."""
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {machine_line(machine()).partition('  ')[2].partition(', load')[0]}. "
        f"Up to {facts.origins} forecasts of each series, from {KNOWN_MIN} known windows on.",
        "",
        "All traces and series together (geometric mean of the shares below), and what a forecast costs:",
        "",
        *_overall_table(facts),
        "",
        "Mean absolute error of the number of requests per window; in brackets as a share of `constant`'s:",
        "",
        *_by_case(facts, "num_req", _with_share),
        "",
        "The same share for the mean prompt length (isl) and the mean answer length (osl), one window ahead:",
        "",
        *_lengths(facts),
        "",
        *(f"* {title}: {source}" for title, source in facts.sources.items()),
        *(f"* {why}" for why in facts.absent),
        "",
        f"![Errors as a share of constant's, and forecasts one window ahead]({PAGE.with_suffix('.png').name})",
    ]
    return "\n".join(lines)


def _predictors(facts: Facts) -> list[str]:
    return [cost.predictor for cost in facts.costs]


def _overall(facts: Facts, predictor: str, ahead: int) -> float:
    shares = [error.scaled for error in facts.errors if error.predictor == predictor and error.ahead == ahead]
    return statistics.geometric_mean([max(share, 1e-3) for share in shares]) if shares else math.nan


def _overall_table(facts: Facts) -> Iterable[str]:
    lengths = list(facts.costs[0].fit_s)
    heads = [
        "predictor",
        *(f"{ahead} ahead" for ahead in AHEAD),
        "failed fits",
        "first forecast, s",
        *(f"{length} windows, ms" for length in lengths),
        "memory, MiB",
    ]
    yield from _head(heads)
    for cost in facts.costs:
        failed = sum(error.failed for error in facts.errors if error.predictor == cost.predictor and error.ahead == 1)
        cells = [
            f"`{cost.predictor}`",
            *(f"{_overall(facts, cost.predictor, ahead):.2f}" for ahead in AHEAD),
            str(failed),
            f"{cost.first_s:.1f}",
            *(number(cost.fit_s[length] * 1e3) for length in lengths),
            f"{cost.memory_mib:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _by_case(facts: Facts, column: str, shown: Any) -> Iterable[str]:
    heads = ["trace", "ahead", *(f"`{predictor}`" for predictor in _predictors(facts))]
    yield from _head(heads)
    for title in facts.sources:
        for ahead in AHEAD:
            found = [_error(facts, predictor, title, column, ahead) for predictor in _predictors(facts)]
            yield f"| {title} | {ahead} | {' | '.join(map(shown, found))} |"


def _lengths(facts: Facts) -> Iterable[str]:
    yield from _head(["trace", "series", *(f"`{predictor}`" for predictor in _predictors(facts))])
    for title in facts.sources:
        for column in ("isl", "osl"):
            found = [_error(facts, predictor, title, column, 1) for predictor in _predictors(facts)]
            if any(error is not None for error in found):
                yield f"| {title} | {column} | {' | '.join(map(_share, found))} |"


def _error(facts: Facts, predictor: str, case: str, column: str, ahead: int) -> Error | None:
    for error in facts.errors:
        if (error.predictor, error.case, error.column, error.ahead) == (predictor, case, column, ahead):
            return error
    return None


def _with_share(error: Error | None) -> str:
    return "–" if error is None else f"{error.mae:.1f} ({error.scaled:.2f})"


def _share(error: Error | None) -> str:
    return "–" if error is None else f"{error.scaled:.2f}"


def _head(heads: Sequence[str]) -> Iterable[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'--:|' * (len(heads) - 1)}"


def draw(facts: Facts, path: Path) -> None:
    """Left: the overall errors. Right: two traces, and what was expected of each window one window before."""
    import matplotlib  # the extra `bench`: only this page needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = list(facts.curves)
    shown = [titles[0], titles[min(3, len(titles) - 1)]]
    figure, (bars, *axes) = pyplot.subplots(1, 1 + len(shown), figsize=(13, 3.8), layout="constrained")
    predictors = _predictors(facts)
    for index, ahead in enumerate(AHEAD):
        places = [place + 0.4 * index - 0.2 for place in range(len(predictors))]
        bars.barh(places, [_overall(facts, name, ahead) for name in predictors], 0.38, label=f"{ahead} ahead")
    bars.axvline(1.0, color="black", linewidth=0.8)
    bars.set_yticks(range(len(predictors)), predictors)
    bars.invert_yaxis()
    bars.set_title("error, as a share of constant's")
    bars.legend()
    for axis, title in zip(axes, shown, strict=True):
        curve = facts.curves[title]
        axis.plot(curve["seen"], color="black", linewidth=1.0, label="seen")
        for name in ("kalman", "arima", "prophet"):
            if name in curve:
                axis.plot(curve["at"], curve[name], ".", color=COLORS[name], markersize=4, label=name)
        axis.set_title(f"requests per window: {title}", fontsize=9)
        axis.set_xlabel("window")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
