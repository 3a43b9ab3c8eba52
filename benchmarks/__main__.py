"""`python -m benchmarks [--short] [--json] [NAME…]`: run the benchmarks, show their figures, judge them.

Exit code 0: all ran. 1: one could not run, or a figure is off its target by more than `harness.GROSS_FACTOR`.
2: no such benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from benchmarks.harness import GROSS_FACTOR, Benchmark, Outcome, execute, machine, machine_line, table

NAMES = (
    "first_token",
    "frontend",
    "colocated",
    "frontends",
    "recording",
    "otel",
    "beside",
    "remote_prefill",
    "hot_path",
    "data_plane",
    "statefile",
    "sim_engine",
    "routing",
    "dispatch",
    "kv_index",
    "simulate",
    "arbiter_idle",
    "dashboard",
    "large",
    "planner_loop",
    "status_command",
    "planner_tick",
    "passes",
    "predictors",
    "mixes",
    "profiles",
    "process_hosts",
    "actuators",
    "held",
    "dynamo_1x",
    "drain",
)
"""Modules of this package, each with `run(short: bool) -> Report`."""


def load(name: str) -> Benchmark:
    """The benchmark of that name."""
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}").run
    return benchmark


def main(words: Sequence[str] | None = None) -> int:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--short", action="store_true", help="fewer and shorter rounds: some two minutes for all")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(words)
    for name in options.names:
        if name not in NAMES:
            parser.error(f"no benchmark {name!r}; there are: {', '.join(NAMES)}")
    facts = machine()
    if not options.json:
        print(machine_line(facts), flush=True)
    outcomes = []
    for name in options.names or NAMES:
        print(f"… {name}", file=sys.stderr, flush=True)
        outcomes.append(execute(name, load(name), options.short))
        if not options.json:
            print(f"\n{table(outcomes[-1])}", flush=True)
    if options.json:
        print(json.dumps({"machine": facts, "short": options.short, "reports": [o.to_dict() for o in outcomes]}))
    return verdict(outcomes)


def verdict(outcomes: Sequence[Outcome]) -> int:
    """The exit code, with a word on stderr for each failure."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failed:
        reason = outcome.error or f"a figure is off its target by more than {GROSS_FACTOR:g} times"
        print(f"{outcome.name} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
