"""`python -m benchmarks.predictors [--short] [--facts FILE] [--page]`: measure, or show what another run measured."""

from __future__ import annotations

from benchmarks.measured_pages import asked, kept_or_measured
from benchmarks.predictors.measure import Facts, measure
from benchmarks.predictors.page import PAGE, section, write


def main() -> None:
    """See the module."""
    words = {"short": "a few forecasts of each series", "page": "write them into docs/predictors.md"}
    options = asked("benchmarks.predictors", __doc__, **words)
    facts = kept_or_measured(Facts, options.facts, lambda: measure(options.short))
    print(section(facts))
    if options.page:
        write(PAGE, facts)


if __name__ == "__main__":
    main()
