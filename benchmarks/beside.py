"""Our Frontend and Processor beside Dynamo 1.x's Rust frontend, in turn in one run, on the same two cores.

Ours: one process with both components, one worker with the simulated engine; and the same with two such processes on
one port, for Dynamo's frontend has threads on both cores. Dynamo's: `python -m dynamo.frontend`
and one mocker. Both graphs run all the time; one is asked at a time, by the same load generator, for the same prompts.

*Tokens*: 64 streams at about the same pace of both engines; CPU is the frontend process's alone. *Requests*: one token
each, engines without a pace: CPU of the frontend, and of all processes of the graph. *First token*: 64 and 256 streams
begun at once, engines without a pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import yaml

from benchmarks.deployment import Running, served
from benchmarks.dynamo_1x import EXAMPLE, installed
from benchmarks.frontend import CONNECTIONS, FAST, PACED, config, two_cores
from benchmarks.harness import Report, at_least, at_most, percentile
from benchmarks.load import generate

STREAMS = (64, 256)
TOKENS = 200
MOCKER_PACED = "1.0"
MOCKER_FAST = "0"
"""`--speedup-ratio`; 0: the mocker waits for nothing."""
OURS, TWO, THEIRS = "ours", "ours, 2 Frontends", "Dynamo's"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    graph: Running
    model: str

    def asked(self, count: int, tokens: int, concurrency: int, words: int = 0, shared: bool = False) -> dict[str, Any]:
        """As `load.beside`; `frontend_s` and `all_s` are CPU seconds. Dynamo's are children of our runners."""
        pids = {
            f"{part}/{n}": each
            for part, pid in self.graph.pids().items()
            for n, each in enumerate((pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))))
            if n == 0 or part != "arbiter"
        }
        plan = {"kind": "beside", "port": self.graph.port, "model": self.model, "count": count, "tokens": tokens}
        found = generate({**plan, "concurrency": concurrency, "words": words, "shared": shared, "pids": pids})
        frontend_s = sum(spent_s for part, spent_s in found["cpu_s"].items() if part.startswith("Frontend/"))
        return {**found, "frontend_s": frontend_s, "all_s": sum(found["cpu_s"].values())}


Values = dict[str, float]


def run(short: bool) -> Report:
    """Both, and ours ÷ Dynamo's, round by round."""
    report = Report("beside")
    if not installed():
        report.notes.append("not run: ai-dynamo is not installed here (docs/dynamo-1x.md says how)")
        return report
    rounds = 2 if short else 7
    with two_cores() as cores:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        paced = _rounds(PACED, MOCKER_PACED, rounds, _paced)
        fast = _rounds(FAST, MOCKER_FAST, rounds, lambda side: _fast(side, 400 if short else 3000))
    found = [{which: {**a[which], **b[which]} for which in a} for a, b in zip(paced, fast, strict=True)]
    for name, unit in FIGURES.items():
        for which in (OURS, TWO, THEIRS):
            report.add(f"{name}: {which}", unit, (each[which][name] for each in found))
        for which, target in ((OURS, TARGETS.get(name)), (TWO, None)):
            ratios = (each[which][name] / each[THEIRS][name] for each in found)
            report.add(f"{name}: {which} ÷ Dynamo's", "", ratios, target)
    return report


FIGURES: Mapping[str, str] = {
    "CPU of the frontend per token": "µs",
    "tokens/s, 64 streams": "1/s",
    "requests/s of one token": "1/s",
    "CPU of the frontend per request": "µs",
    "CPU of all processes per request": "µs",
    **{f"first token, {count} streams, p50": "ms" for count in STREAMS},
}
TARGETS = {
    "CPU of the frontend per token": at_most(1.0),
    "requests/s of one token": at_least(1.0),
    **{f"first token, {count} streams, p50": at_most(1.0) for count in STREAMS},
}


def _paced(side: Side) -> Values:
    found = side.asked(64, TOKENS, 64)
    return {
        "CPU of the frontend per token": found["frontend_s"] / found["tokens"] * 1e6,
        "tokens/s, 64 streams": found["tokens"] / found["wall_s"],
    }


def _fast(side: Side, requests: int) -> Values:
    found = side.asked(requests, 1, CONNECTIONS)
    values = {
        "requests/s of one token": found["per_s"],
        "CPU of the frontend per request": found["frontend_s"] / requests * 1e6,
        "CPU of all processes per request": found["all_s"] / requests * 1e6,
    }
    for count in STREAMS:
        found = side.asked(count, 8, count)
        values[f"first token, {count} streams, p50"] = percentile(found["first_s"], 0.5) * 1e3
    return values


def _rounds(sim: dict[str, Any], speedup: str, rounds: int, measure: Any) -> list[dict[str, Values]]:
    """The rounds of all, in turn; the first one only warms."""
    with sides(sim, speedup) as all_sides:
        found = []
        for n in range(1 + rounds):
            order = list(all_sides) if n % 2 else list(reversed(all_sides))
            found.append({which: measure(all_sides[which]) for which in order})
        return found[1:]


@contextmanager
def sides(sim: dict[str, Any], speedup: str) -> Iterator[dict[str, Side]]:
    """All graphs, ready."""
    theirs = yaml.safe_load((EXAMPLE / "agg.yaml").read_text())
    theirs["Frontend"]["ports"]["http"] = 0
    theirs["Mocker"]["command"] += f" --speedup-ratio {speedup}"
    with ExitStack() as stack:
        one = config(sim, {})
        two = {**one, "Frontend": {**one["Frontend"], "ServiceArgs": {"workers": 2}}}
        ours, twice = (stack.enter_context(served("graphs.agg:Frontend", each)) for each in (one, two))
        dynamos = stack.enter_context(served(None, theirs, cwd=EXAMPLE))
        yield {OURS: Side(ours, "sim-tiny"), TWO: Side(twice, "sim-tiny"), THEIRS: Side(dynamos, "tiny")}
