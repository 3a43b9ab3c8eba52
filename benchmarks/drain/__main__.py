"""`python -m benchmarks.drain [--short] [--facts FILE] [--page]`: run it, or judge what another run left behind."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.drain.facts import Facts
from benchmarks.drain.judge import judge
from benchmarks.drain.page import section, write
from benchmarks.drain.report import complaints
from benchmarks.drain.run import LONG, SHORT, measure

PAGE = Path(__file__).parents[2] / "docs" / "drain.md"


def main() -> int:
    """Exit code 1 if a request was dropped, wrong, or sent too late."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drain", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="40 scale actions instead of 1,000")
    parser.add_argument("--facts", type=Path, help="keep the run's facts in this file; if it exists, judge these")
    parser.add_argument("--page", action="store_true", help="write table and plot of docs/drain.md (extra: bench)")
    options = parser.parse_args()
    if options.facts is not None and options.facts.exists():
        facts = Facts.load(options.facts)
    else:
        facts = measure(SHORT if options.short else LONG)
        if options.facts is not None:
            facts.save(options.facts)
    verdict = judge(facts)
    print(section(verdict, facts))
    for line in complaints(verdict, facts):
        print(line, file=sys.stderr)
    if options.page:
        write(PAGE, verdict, facts)
    return 0 if verdict.ok and not facts.unasked else 1


if __name__ == "__main__":
    sys.exit(main())
