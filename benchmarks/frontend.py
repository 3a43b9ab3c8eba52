"""Everything between a client and the engine: HTTP, Frontend, Processor, NATS, worker. Everything on two cores.

*Requests*: an engine so fast that its own time vanishes, asked in turn through everything and directly, in the load
generator's own process; `added` is the difference, pair by pair. *Tokens*: the engine at a worker's pace (an open
loop: it does not wait for readers), 64 and 128 streams at once. `added` is from the engine's `yield` in the
worker to the read in the client. The load generator, etcd and NATS share the two cores.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.deployment import Running, served
from benchmarks.harness import Report, at_least, at_most, percentile
from benchmarks.load import TOKENS_PER_REQUEST, generate

CORES = 2
ADDED_TARGET_MS = 5.0
TOKENS_PER_S_TARGET = 5000.0
CONNECTIONS = 32
GRAPHS = Path(__file__).parent

ONE_CHARACTER = {"token_low": 67, "token_high": 68}
"""The engine writes only "a": what arrived can be counted in characters, however tokens were put together."""
FAST = {**ONE_CHARACTER, "speed": 1e6}
PACED = {**ONE_CHARACTER, "speed": 0.6}
"""The H200 profile, slowed down until 64 streams make somewhat more than the target asks for."""
STREAMS = (1, 64, 128, 256)
TOKENS = 300
"""Per stream, in both forms: a longer context makes the engine slower, so other lengths would not compare."""

Arrivals = dict[str, list[tuple[float, int]]]


def run(short: bool) -> Report:
    """Requests, then tokens."""
    report = Report("frontend")
    sizes = {"rounds": 3, "requests": 80} if short else {"rounds": 5, "requests": 400}
    with two_cores() as cores:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        _requests(report, "request", "graphs.agg:Frontend", **sizes)
        _requests(report, "request with remote prefill", "graphs.disagg:Frontend", **sizes)
        _tokens(report, STREAMS[:3] if short else STREAMS, rounds=1 if short else 5)
    return report


@contextmanager
def two_cores() -> Iterator[list[int]]:
    """This process, and so whatever it starts, on the first two cores that it may use."""
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:CORES]
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)


def config(sim: dict[str, Any], envs: dict[str, str], *, prefill: bool = False) -> dict[str, Any]:
    """The graph's configuration; with `prefill`, every prompt is prefilled by the PrefillWorker."""
    sections: dict[str, Any] = {
        "Host": {"gpus": "sim:2"},
        "Frontend": {"port": 0},
        "VllmWorker": {"sim": sim, "ServiceArgs": {"envs": envs}},
    }
    if prefill:
        sections["VllmWorker"]["remote-prefill"] = True
        sections["PrefillWorker"] = {"sim": sim}
    return sections


# --- requests ----------------------------------------------------------------------------------


def _requests(report: Report, what: str, graph: str, rounds: int, requests: int) -> None:
    with served(graph, config(FAST, {}, prefill="disagg" in graph)) as running:
        plan = {"rounds": rounds, "requests": requests, "concurrency": CONNECTIONS, "sim": FAST}
        found = generate({"kind": "latency", "port": running.port, **plan})["rounds"]
    added = [[http - direct for http, direct in zip(r["http_s"], r["direct_s"], strict=True)] for r in found]
    target = at_most(ADDED_TARGET_MS) if what == "request" else None
    for name, share, bound in (("p50", 0.5, target), ("p99", 0.99, None)):
        report.add(f"{what}: added, {name}", "ms", (percentile(values, share) * 1e3 for values in added), bound)
    report.add(f"{what}: engine alone, p50", "ms", (percentile(r["direct_s"], 0.5) * 1e3 for r in found))
    report.add(f"{what}: first token streamed, p50", "ms", (percentile(r["first_token_s"], 0.5) * 1e3 for r in found))
    report.add(f"{what}: requests/s, {CONNECTIONS} connections", "1/s", (r["http_per_s"] for r in found))
    if what == "request":
        report.add(f"{what}: requests/s, engine alone", "1/s", (r["direct_per_s"] for r in found))
        report.notes.append(f"a request has {TOKENS_PER_REQUEST} tokens, and is not streamed unless it says so")


# --- tokens ------------------------------------------------------------------------------------


def _tokens(report: Report, counts: Sequence[int], rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="dyn-bench-") as name:
        stamps = Path(name)
        envs = {"BENCH_STAMPS": name}
        with served("graphs.stamped:Frontend", config(PACED, envs), cwd=GRAPHS) as graph:
            pids = graph.pids()
            _streams(graph, 16, 30, stamps, pids)  # connections, code paths: warm
            for count in counts:
                found = [_streams(graph, count, TOKENS, stamps, pids) for _ in range(rounds)]
                _report_streams(report, count, found)
                if count == 64:
                    _report_processes(report, found)


def _streams(graph: Running, count: int, tokens: int, stamps: Path, pids: dict[str, int]) -> dict[str, Any]:
    """One round: rates at both ends, each token's way, each process's share."""
    result = generate({"kind": "streams", "port": graph.port, "count": count, "tokens": tokens, "pids": pids})
    arrivals: Arrivals = {name: [(at, n) for at, n in pairs] for name, pairs in result["arrivals"].items()}
    made = {name: yield_times((stamps / name).read_bytes()) for name in arrivals}
    return {
        "offered_per_s": sum(rate([(at, n) for n, at in enumerate(times, 1)]) for times in made.values()),
        "delivered_per_s": sum(rate(pairs) for pairs in arrivals.values()),
        "added_s": [way for name, pairs in arrivals.items() for way in ways(made[name], pairs)],
        "cores": result["cores"],
        "rss_mib": result["rss_mib"],
    }


def yield_times(stamps: bytes) -> list[float]:
    """Seconds at which each token was yielded, from the worker's notes (pairs of time and number of tokens)."""
    values = array("d", stamps)
    return [at for at, count in zip(values[::2], values[1::2], strict=True) for _ in range(int(count))]


def rate(points: Sequence[tuple[float, int]]) -> float:
    """Tokens per second from the first to the last of (time, tokens so far)."""
    (begin_s, first), (end_s, last) = points[0], points[-1]
    return (last - first) / (end_s - begin_s)


def increments(arrivals: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """(time, tokens so far) to (time, tokens that came then)."""
    counts = [0, *(count for _, count in arrivals)]
    return [(at, count - before) for (at, count), before in zip(arrivals, counts, strict=False)]


def ways(made: Sequence[float], arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds from `yield` to read, of each token of a stream. ValueError where they are not the same tokens."""
    read = [at for at, count in increments(arrivals) for _ in range(count)]
    return [end - begin for begin, end in zip(made, read, strict=True)]


def _report_streams(report: Report, count: int, found: Sequence[dict[str, Any]]) -> None:
    what = f"{count} stream{'s' if count > 1 else ''}"
    if count > 1:
        target = at_least(TOKENS_PER_S_TARGET) if count == 64 else None
        report.add(f"{what}: tokens/s made by the engine", "1/s", (r["offered_per_s"] for r in found))
        report.add(f"{what}: tokens/s read by the client", "1/s", (r["delivered_per_s"] for r in found), target)
        report.add(f"{what}: read ÷ made", "", (r["delivered_per_s"] / r["offered_per_s"] for r in found))
    for share in (0.5, 0.99):
        values = (percentile(r["added_s"], share) * 1e3 for r in found)
        report.add(f"{what}: added per token, p{share * 100:.0f}", "ms", values)


def _report_processes(report: Report, found: Sequence[dict[str, Any]]) -> None:
    for name in found[0]["cores"]:
        report.add(f"64 streams: CPU of {name}", "cores", (r["cores"][name] for r in found))
    for name in found[0]["rss_mib"]:
        report.add(f"64 streams: memory of {name}", "MiB", (r["rss_mib"][name] for r in found))
