"""Two Frontends on one port beside one, in turn in one run, on two cores: what they get through, and at which cost.

*Requests*: one token each, whole, on 64 kept connections. *Tokens*: 64 streams, first at an engine's pace, for the CPU
of all Frontends per token, then without one, for tokens per second. The Processor runs in the Frontends' processes;
engine, load generator, etcd and NATS are on the same two cores, so the second Frontend has only what they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.deployment import Running, served
from benchmarks.frontend import FAST, PACED, config, two_cores
from benchmarks.harness import Report
from benchmarks.load import generate

CONNECTIONS = 64
TOKENS = 200
NUMBERS = (1, 2)

Values = dict[str, float]


def run(short: bool) -> Report:
    """Figures of both, and two ÷ one, round by round."""
    report = Report("frontends")
    rounds, requests = (2, 400) if short else (5, 3000)
    with two_cores() as cores:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        paced = _rounds(PACED, rounds, _paced)
        fast = _rounds(FAST, rounds, lambda graph: _fast(graph, requests))
    found = [{number: {**a[number], **b[number]} for number in a} for a, b in zip(paced, fast, strict=True)]
    for name, unit in FIGURES.items():
        for number in NUMBERS:
            report.add(f"{name}: {number} Frontend{'s' * (number > 1)}", unit, (each[number][name] for each in found))
        report.add(f"{name}: 2 ÷ 1", "", (each[2][name] / each[1][name] for each in found))
    return report


FIGURES: Mapping[str, str] = {
    "requests/s of one token": "1/s",
    "CPU of the Frontends per request": "µs",
    "tokens/s, 64 streams, an engine without a pace": "1/s",
    "CPU of the Frontends per token, 64 streams at a pace": "µs",
    "busiest Frontend's share of the CPU, 64 streams": "",
}


def _rounds(sim: dict[str, Any], rounds: int, measure: Callable[[Running], Values]) -> list[dict[int, Values]]:
    """The measures of both graphs, round by round; the first round only warms."""
    with ExitStack() as stack:
        graphs = {
            number: stack.enter_context(served("graphs.agg:Frontend", _config(sim, number))) for number in NUMBERS
        }
        found = []
        for n in range(1 + rounds):
            order = NUMBERS if n % 2 else tuple(reversed(NUMBERS))
            found.append({number: measure(graphs[number]) for number in order})
        return found[1:]


def _config(sim: dict[str, Any], number: int) -> dict[str, Any]:
    whole = config(sim, {})
    return {**whole, "Frontend": {**whole["Frontend"], "ServiceArgs": {"workers": number}}}


def _asked(graph: Running, count: int, tokens: int) -> dict[str, Any]:
    workers = graph.status["workers"]
    pids = {each["watcher_name"]: each["pid"] for each in workers if each["component"] == "Frontend"}
    plan = {"kind": "beside", "port": graph.port, "model": "sim-tiny", "count": count, "tokens": tokens}
    return generate({**plan, "concurrency": CONNECTIONS, "pids": pids})


def _paced(graph: Running) -> Values:
    found = _asked(graph, CONNECTIONS, TOKENS)
    spent_s = sum(found["cpu_s"].values())
    return {
        "CPU of the Frontends per token, 64 streams at a pace": spent_s / found["tokens"] * 1e6,
        "busiest Frontend's share of the CPU, 64 streams": max(found["cpu_s"].values()) / spent_s,
    }


def _fast(graph: Running, requests: int) -> Values:
    found = _asked(graph, requests, 1)
    streamed = _asked(graph, 2 * CONNECTIONS, TOKENS)
    return {
        "requests/s of one token": found["per_s"],
        "CPU of the Frontends per request": sum(found["cpu_s"].values()) / requests * 1e6,
        "tokens/s, 64 streams, an engine without a pace": streamed["tokens"] / streamed["wall_s"],
    }
