"""How well predictors continue traces, and what a forecast costs. See docs/predictors.md."""

from __future__ import annotations

from benchmarks.harness import Report


def run(short: bool) -> Report:
    """Errors as a share of `constant`'s, and times, of all predictors that are installed."""
    from benchmarks.predictors.measure import measure
    from benchmarks.predictors.page import report

    return report(measure(short))
