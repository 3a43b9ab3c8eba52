"""Scale-downs under load: what ours loses (nothing), and what the policies lose that others ship. See docs/drain.md.

A host of eight simulated GPUs serves the open-loop load of a chat service while workers come and go. Everything is
real but the engines' time: arbiter, etcd, NATS, workers, and an HTTP client that retries nothing and compares every
stream. `speed` divides the engines' time, and the budgets of the others with it.
"""

from __future__ import annotations

from benchmarks.harness import Report


def run(short: bool) -> Report:
    """40 scale actions, or 1,000. RuntimeError where a request was dropped, wrong, or sent too late."""
    from benchmarks.drain.report import report
    from benchmarks.drain.run import LONG, SHORT, measure

    return report(measure(SHORT if short else LONG))
