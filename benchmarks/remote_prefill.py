"""Every prompt prefilled elsewhere: our disaggregated graph, an earlier version of it, and Dynamo 1.x's, in turn.

Requests of one token, engines without a pace, one prefill and one decode worker. All graphs run all the time; one is
asked at a time, by the same load generator, for the same prompts. The time to the first token is that of the whole
answer. CPU is that of all processes of a graph; arbiter, etcd and NATS count.

`DYN_BENCH_BEFORE` names the checkout of an earlier version. `DYN_BENCH_WORDS` lengthens each prompt by so many words
(of five tokens each). There are fewer requests then, and no more at once than there are. With `DYN_BENCH_ROUTER=kv` all
have a KV router and two decode workers, and the words are a prefix that prompts share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.beside import MOCKER_FAST, OURS, THEIRS, Side
from benchmarks.deployment import EXAMPLE, served
from benchmarks.dynamo_1x import EXAMPLE as DYNAMO_EXAMPLE
from benchmarks.dynamo_1x import installed
from benchmarks.frontend import FAST, config, two_cores
from benchmarks.harness import Report, at_least, at_most, percentile
from benchmarks.processes import ROOT

BEFORE = "before"
AT_ONCE = (1, 64, 256)
LEAST = 64
"""Requests, however long their prompts are."""
SHORT_WORDS = 300
"""With so many words there are half as many requests."""
DECODE_WORKERS = 2
"""Where there is a router."""
PARTS = ("Frontend", "Router", "VllmWorker", "PrefillWorker", "Decode", "Prefill", "nats", "etcd", "arbiter")

Values = dict[str, float]


def run(short: bool) -> Report:
    """All sides, and ours ÷ each of the others, round by round."""
    report = Report("remote_prefill")
    with two_cores() as cores, sides() as all_sides:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        if THEIRS not in all_sides:
            report.notes.append("without Dynamo: ai-dynamo is not installed here (docs/dynamo-1x.md says how)")
        found = _rounds(all_sides, 3 if short else 7, 300 if short else 1500)
    for name in dict.fromkeys(name for which in found[0] for name in found[0][which]):
        unit = "1/s" if name.startswith("requests/s") else "µs" if name.startswith("CPU") else "ms"
        for which in all_sides:
            if all(name in each[which] for each in found):
                report.add(f"{name}: {which}", unit, (each[which][name] for each in found))
        for which in all_sides:
            if which == OURS or not all(name in each[which] and name in each[OURS] for each in found):
                continue
            target = None if which != THEIRS else at_least(1.0) if unit == "1/s" else at_most(1.0)
            ratios = (each[OURS][name] / each[which][name] for each in found)
            report.add(f"{name}: {OURS} ÷ {which}", "", ratios, target)
    return report


def _routed() -> bool:
    return os.environ.get("DYN_BENCH_ROUTER") == "kv"


def _rounds(all_sides: Mapping[str, Side], rounds: int, requests: int) -> list[dict[str, Values]]:
    """The rounds of all, in turn; the first one only warms."""
    found = []
    for n in range(1 + rounds):
        order = list(all_sides) if n % 2 else list(reversed(all_sides))
        found.append({which: _asked(all_sides[which], requests) for which in order})
    return found[1:]


def _asked(side: Side, requests: int) -> Values:
    values: Values = {}
    words = int(os.environ.get("DYN_BENCH_WORDS", "0"))
    requests = max(LEAST, requests * SHORT_WORDS // (SHORT_WORDS + words))
    for at_once in (each for each in AT_ONCE if each <= requests):
        count = max(requests // 5, 50) if at_once == 1 else max(requests, 2 * at_once)
        found = side.asked(count, 1, at_once, words, shared=_routed())
        values[f"requests/s, {at_once} at once"] = found["per_s"]
        values[f"first token, {at_once} at once, p50"] = median(found["first_s"]) * 1e3
        values[f"first token, {at_once} at once, p99"] = percentile(found["first_s"], 0.99) * 1e3
        values[f"CPU of all per request, {at_once} at once"] = found["all_s"] / count * 1e6
        if at_once == 64:
            for part in PARTS:
                if spent_s := _of(part, found["cpu_s"]):
                    values[f"CPU of {part} per request, {at_once} at once"] = spent_s / count * 1e6
    return values


def _of(part: str, cpu_s: Mapping[str, float]) -> float:
    return sum(spent_s for name, spent_s in cpu_s.items() if name.partition("/")[0] == part)


@contextmanager
def sides() -> Iterator[dict[str, Side]]:
    """All graphs, ready."""
    with ExitStack() as stack:

        def ours(root: Path) -> Side:
            env = {"PYTHONPATH": str(root)}
            cwd = root / EXAMPLE.relative_to(ROOT)
            graph, sections = "graphs.disagg:Frontend", config(FAST, {}, prefill=True)
            if _routed():
                graph, routing = "graphs.disagg_router:Frontend", {"common-configs": ["router"]}
                sections |= {"Common": {"router": "kv"}, "Processor": routing, "Router": routing}
                sections["Host"]["gpus"] = f"sim:{DECODE_WORKERS + 1}"
                sections["VllmWorker"]["ServiceArgs"]["workers"] = DECODE_WORKERS
            return Side(stack.enter_context(served(graph, sections, cwd=cwd, env=env)), "sim-tiny")

        found = {OURS: ours(ROOT)}
        if before := os.environ.get("DYN_BENCH_BEFORE"):
            found[BEFORE] = ours(Path(before))
        if installed():
            found[THEIRS] = Side(stack.enter_context(served(None, _dynamos(), cwd=DYNAMO_EXAMPLE)), "tiny")
        yield found


def _dynamos() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DYNAMO_EXAMPLE / "disagg.yaml").read_text())
    parsed["Frontend"]["ports"]["http"] = 0
    if _routed():
        parsed["Decode"]["ServiceArgs"]["workers"] = DECODE_WORKERS
    else:
        command = parsed["Frontend"]["command"].replace("--router-mode kv", "--router-mode round-robin")
        parsed["Frontend"]["command"] = command
    for role in ("Decode", "Prefill"):
        parsed[role]["command"] += f" --speedup-ratio {MOCKER_FAST}"
    return parsed
