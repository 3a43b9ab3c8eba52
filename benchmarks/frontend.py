"""What stands between a client and the engine: HTTP, Frontend, Processor, NATS, worker. Everything on two cores.

*Requests*: an engine so fast that its own time vanishes, asked in turn through everything and directly, in the load
generator's own process; `added` is the difference, pair by pair. *Tokens*: the engine at a worker's pace (an open
loop: it does not wait for readers), 64 and 128 streams at once; `added` is from the engine's `yield` in the
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
PACED = {**ONE_CHARACTER, "speed": 0.55}
"""The H200 profile, slowed down: 64 streams make about 5,600 tokens/s, 128 about 8,700."""
TOKENS_PER_S_EACH = {1: 120, 64: 88, 128: 68}
"""About; decides how long a number of streams runs."""

Arrivals = dict[str, list[tuple[float, int]]]


def run(short: bool) -> Report:
    """Requests, then tokens."""
    report = Report("frontend")
    with two_cores() as cores:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        _requests(report, rounds=3 if short else 5, requests=100 if short else 400)
        _tokens(report, rounds=1 if short else 3, seconds=2.5 if short else 6.0)
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


def config(sim: dict[str, Any], envs: dict[str, str]) -> dict[str, Any]:
    """The aggregated graph's configuration."""
    return {
        "Host": {"gpus": "sim:1"},
        "Frontend": {"port": 0},
        "VllmWorker": {"sim": sim, "ServiceArgs": {"envs": envs}},
    }


# --- requests ----------------------------------------------------------------------------------


def _requests(report: Report, rounds: int, requests: int) -> None:
    with served("graphs.agg:Frontend", config(FAST, {})) as graph:
        found = generate(
            {
                "kind": "latency",
                "port": graph.port,
                "rounds": rounds,
                "requests": requests,
                "concurrency": CONNECTIONS,
                "sim": FAST,
            }
        )["rounds"]
    added = [[http - direct for http, direct in zip(r["http_s"], r["direct_s"], strict=True)] for r in found]
    what = f"request of {TOKENS_PER_REQUEST} tokens"
    for share, target in ((0.5, at_most(ADDED_TARGET_MS)), (0.99, None)):
        name = f"p{share * 100:.0f}"
        report.add(f"{what}: added, {name}", "ms", (percentile(values, share) * 1e3 for values in added), target)
    report.add(f"{what}: engine alone, p50", "ms", (percentile(r["direct_s"], 0.5) * 1e3 for r in found))
    report.add("first token of a stream, p50", "ms", (percentile(r["first_token_s"], 0.5) * 1e3 for r in found))
    report.add(f"requests/s, {CONNECTIONS} connections", "1/s", (r["http_per_s"] for r in found))
    report.add("requests/s, engine alone", "1/s", (r["direct_per_s"] for r in found))


# --- tokens ------------------------------------------------------------------------------------


def _tokens(report: Report, rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="dyn-bench-") as name:
        stamps = Path(name)
        envs = {"BENCH_STAMPS": name}
        with served("graphs.stamped:Frontend", config(PACED, envs), cwd=GRAPHS) as graph:
            pids = graph.pids()
            _streams(graph, 1, 1.0, stamps, pids)  # connections, code paths: warm
            for count in TOKENS_PER_S_EACH:
                found = [_streams(graph, count, seconds, stamps, pids) for _ in range(rounds)]
                _report_streams(report, count, found)
                if count == 64:
                    _report_processes(report, found)


def _streams(graph: Running, count: int, seconds: float, stamps: Path, pids: dict[str, int]) -> dict[str, Any]:
    """One round: rates in the time in which all streams run, each token's way, each process's share."""
    tokens = int(TOKENS_PER_S_EACH[count] * seconds)
    result = generate({"kind": "streams", "port": graph.port, "count": count, "tokens": tokens, "pids": pids})
    arrivals: Arrivals = {name: [(at, n) for at, n in pairs] for name, pairs in result["arrivals"].items()}
    made = {name: yield_times((stamps / name).read_bytes()) for name in arrivals}
    begin_s, end_s = max(times[0] for times in made.values()), min(times[-1] for times in made.values())
    length_s = end_s - begin_s
    return {
        "offered_per_s": sum(begin_s < at <= end_s for times in made.values() for at in times) / length_s,
        "delivered_per_s": sum(
            n for pairs in arrivals.values() for at, n in increments(pairs) if begin_s < at <= end_s
        )
        / length_s,
        "added_s": [way for name, pairs in arrivals.items() for way in ways(made[name], pairs)],
        "reads": sum(map(len, arrivals.values())),
        "cores": result["cores"],
        "rss_mib": result["rss_mib"],
    }


def yield_times(stamps: bytes) -> list[float]:
    """Seconds at which each token was yielded, from the worker's notes (pairs of time and number of tokens)."""
    values = array("d", stamps)
    return [at for at, count in zip(values[::2], values[1::2], strict=True) for _ in range(int(count))]


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
