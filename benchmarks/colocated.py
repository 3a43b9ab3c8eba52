"""Frontend and Processor in one process beside the same graph with them apart: in turn, in one run, on two cores.

*Requests*: 32 connections, an engine so fast that its own time vanishes. *Tokens*: 64 streams at an engine's pace;
CPU is that of the Frontend and, where it is apart, the Processor. Both graphs run all the time; one is asked at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.deployment import Running, served
from benchmarks.frontend import CONNECTIONS, FAST, PACED, config, increments, rate, two_cores
from benchmarks.harness import Report, at_least, at_most, percentile
from benchmarks.load import generate

APART: dict[str, Any] = {"ServiceArgs": {"colocate": []}}
STREAMS = 64
OURS = ("Frontend", "Processor")

Graphs = Mapping[str, Running]
Values = dict[str, float]


def run(short: bool) -> Report:
    """Ratios, colocated ÷ apart, round by round."""
    report = Report("colocated")
    rounds, requests, tokens = (2, 80, 60) if short else (7, 800, 300)
    with two_cores() as cores:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        found = _rounds(FAST, rounds, lambda graph: _requests(graph, requests))
        found = [
            {**one, **other}
            for one, other in zip(found, _rounds(PACED, rounds, lambda graph: _tokens(graph, tokens)), strict=True)
        ]
    for name, unit in (("requests/s", "1/s"), ("first token, p50", "ms"), ("CPU per 1,000 tokens", "ms")):
        for which in ("apart", "colocated"):
            report.add(f"{name}, {which}", unit, (each[f"{which} {name}"] for each in found))
        target = at_least(1.0) if name == "requests/s" else at_most(1.0)
        report.add(
            f"{name}, colocated ÷ apart", "", (e[f"colocated {name}"] / e[f"apart {name}"] for e in found), target
        )
    return report


def _rounds(sim: dict[str, Any], rounds: int, measure: Callable[[Running], Values]) -> list[Values]:
    """The measures of both graphs, round by round; the first round only warms."""
    with ExitStack() as stack:
        graphs = {
            which: stack.enter_context(
                served("graphs.agg:Frontend", {**whole, "Frontend": {**whole["Frontend"], **more}})
            )
            for whole in (config(sim, {}),)
            for which, more in (("apart", APART), ("colocated", {}))
        }
        found = []
        for n in range(1 + rounds):
            order = list(graphs) if n % 2 else list(reversed(graphs))
            values = {which: measure(graphs[which]) for which in order}
            found.append({f"{which} {name}": value for which in order for name, value in values[which].items()})
        return found[1:]


def _requests(graph: Running, requests: int) -> Values:
    plan = {"kind": "latency", "port": graph.port, "rounds": 1, "requests": requests, "concurrency": CONNECTIONS}
    (found,) = generate({**plan, "sim": FAST})["rounds"]
    return {"requests/s": found["http_per_s"], "first token, p50": percentile(found["first_token_s"], 0.5) * 1e3}


def _tokens(graph: Running, tokens: int) -> Values:
    pids = {name: pid for name, pid in graph.pids().items() if name in OURS}
    found = generate({"kind": "streams", "port": graph.port, "count": STREAMS, "tokens": tokens, "pids": pids})
    arrivals = [[(at, count) for at, count in pairs] for pairs in found["arrivals"].values()]
    assert all(sum(count for _, count in increments(pairs)) == tokens for pairs in arrivals)
    delivered_per_s = sum(rate(pairs) for pairs in arrivals)
    return {"CPU per 1,000 tokens": sum(found["cores"].values()) / delivered_per_s * 1e6}
