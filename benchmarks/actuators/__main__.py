"""`python -m benchmarks.actuators [--short] [--facts FILE] [--page]`: measure, or show what another run measured."""

from __future__ import annotations

from benchmarks.actuators.facts import Kept
from benchmarks.actuators.page import PAGE, section, write
from benchmarks.actuators.rounds import measure
from benchmarks.measured_pages import asked, kept_or_measured


def main() -> None:
    """See the module."""
    words = {"short": "two rounds on the simulated engine, one on vLLM", "page": "write them into docs/actuators.md"}
    options = asked("benchmarks.actuators", __doc__, **words)
    facts = kept_or_measured(Kept, options.facts, lambda: Kept(measure(options.short))).facts
    print(section(facts))
    if options.page:
        write(PAGE, facts)


if __name__ == "__main__":
    main()
