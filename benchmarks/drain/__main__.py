"""`python -m benchmarks.drain [--short] [--facts FILE] [--page]`: run it, or judge what another run left behind."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.drain.facts import Facts
from benchmarks.drain.judge import judge
from benchmarks.drain.page import section, write
from benchmarks.drain.report import complaints
from benchmarks.drain.run import LONG, SHORT, measure
from benchmarks.measured_pages import asked, kept_or_measured

PAGE = Path(__file__).parents[2] / "docs" / "drain.md"


def main() -> int:
    """Exit code 1 if a request was dropped, wrong, or sent too late."""
    words = {"short": "40 scale actions instead of 1,000", "page": "write table and plot of docs/drain.md"}
    options = asked("benchmarks.drain", __doc__, **words)
    facts = kept_or_measured(Facts, options.facts, lambda: measure(SHORT if options.short else LONG))
    verdict = judge(facts)
    print(section(verdict, facts))
    for line in complaints(verdict, facts):
        print(line, file=sys.stderr)
    if options.page:
        write(PAGE, verdict, facts)
    return 0 if verdict.ok and not facts.unasked else 1


if __name__ == "__main__":
    sys.exit(main())
