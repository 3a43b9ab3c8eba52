"""A graph whose Frontend records its requests (`record-trace`) beside the same one that does not: in turn, in one run.

32 connections, an engine so fast that its own time vanishes, on two cores: the most that a recorder can cost.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.deployment import Running, served
from benchmarks.frontend import CONNECTIONS, FAST, config, two_cores
from benchmarks.harness import Report, at_least, at_most, percentile
from benchmarks.load import generate

OFF, ON = "not recorded", "recorded"


def run(short: bool) -> Report:
    """Ratios, recorded ÷ not recorded, round by round; the first round only warms."""
    report = Report("recording")
    rounds, requests = (2, 80) if short else (9, 400)
    with two_cores() as cores, ExitStack() as stack:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dyn-bench-"))) / "requests.jsonl"
        whole = config(FAST, {})
        recorded = {**whole, "Frontend": {**whole["Frontend"], "record-trace": str(file)}}
        graphs = {
            OFF: stack.enter_context(served("graphs.agg:Frontend", whole)),
            ON: stack.enter_context(served("graphs.agg:Frontend", recorded)),
        }
        found = []
        for n in range(1 + rounds):
            order = list(graphs) if n % 2 else list(reversed(graphs))
            found.append({which: _measured(graphs[which], requests) for which in order})
    for at, (name, unit) in enumerate((("first token, p50", "ms"), ("first token, p99", "ms"), ("requests/s", "1/s"))):
        for which in (OFF, ON):
            report.add(f"{name}, {which}", unit, (each[which][at] for each in found[1:]))
        target = (at_most(1.03), None, at_least(0.97))[at]
        report.add(f"{name}, {ON} ÷ {OFF}", "", (each[ON][at] / each[OFF][at] for each in found[1:]), target)
    return report


def _measured(graph: Running, requests: int) -> tuple[float, float, float]:
    plan = {"kind": "latency", "port": graph.port, "rounds": 1, "requests": requests, "concurrency": CONNECTIONS}
    (found,) = generate({**plan, "sim": FAST})["rounds"]
    first_ms = [percentile(found["first_token_s"], share) * 1e3 for share in (0.5, 0.99)]
    return first_ms[0], first_ms[1], found["http_per_s"]
