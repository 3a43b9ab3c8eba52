"""`python -m benchmarks.predictors [--short] [--facts FILE] [--page]`: measure, or show what another run measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.predictors.measure import Facts, measure
from benchmarks.predictors.page import PAGE, section, write


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictors", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few forecasts of each series")
    parser.add_argument("--facts", type=Path, help="keep what was measured in this file; if it exists, show it")
    parser.add_argument("--page", action="store_true", help="write them into docs/predictors.md (extra: bench)")
    options = parser.parse_args()
    if options.facts is not None and options.facts.exists():
        facts = Facts.load(options.facts)
    else:
        facts = measure(options.short)
        if options.facts is not None:
            facts.save(options.facts)
    print(section(facts))
    if options.page:
        write(PAGE, facts)


if __name__ == "__main__":
    main()
