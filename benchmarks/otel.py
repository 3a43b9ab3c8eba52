"""A graph that sends traces of 10 % of its requests beside the same graph that sends none: in turn, in one run.

*Paced*: 64 streams at an engine's pace, of 100 tokens. *Fast*: 32 connections, requests of 16 tokens, an engine so fast
that its own time vanishes: the most that traces can cost. CPU is that of the Frontend, the Processor and the worker.
The receiver is a thread of this process, whose CPU does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc

from benchmarks.deployment import Running, served
from benchmarks.frontend import CONNECTIONS, FAST, PACED, config, two_cores
from benchmarks.harness import Report, at_most
from benchmarks.load import generate

OFF, ON = "off", "on at 10 %"
OURS = ("Frontend", "VllmWorker")
STREAMS, TOKENS, FEW_TOKENS = 64, 100, 16
TARGET = 1.03

Values = dict[str, float]


class Receiver:
    """Takes all traces and keeps their number of bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.url = ""

    def export(self, request: bytes, _context: Any) -> bytes:
        """OTLP's only call for traces. An empty answer means that all were taken."""
        self.bytes += len(request)
        return b""

    @contextmanager
    def running(self) -> Iterator[Receiver]:
        server = grpc.server(ThreadPoolExecutor(1))
        export = {"Export": grpc.unary_unary_rpc_method_handler(self.export)}
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, export),))
        self.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield self
        finally:
            server.stop(None).wait()


def run(short: bool) -> Report:
    """CPU per token, on ÷ off, round by round; the first round only warms.

    The number of rounds is even: each of the two goes first as often as the other.
    """
    report = Report("otel")
    rounds, paced, few = (4, 64, 320) if short else (16, 256, 2000)
    with two_cores() as cores, Receiver().running() as receiver:
        report.notes.append(f"everything, the load generator included, on cores {', '.join(map(str, cores))}")
        for what, sim, count, tokens, concurrency, target in (
            ("paced", PACED, paced, TOKENS, STREAMS, at_most(TARGET)),
            ("fast", FAST, few, FEW_TOKENS, CONNECTIONS, None),
        ):
            found = _rounds(receiver, sim, rounds, (count, tokens, concurrency))
            for which in (OFF, ON):
                report.add(f"{what}: CPU per token, {which}", "µs", (each[which] for each in found))
            report.add(f"{what}: CPU per token, {ON} ÷ {OFF}", "", (each[ON] / each[OFF] for each in found), target)
        if receiver.bytes == 0:
            raise RuntimeError("no trace came: the figures would say nothing")
        report.notes.append(f"{receiver.bytes:,} bytes of traces came")
    return report


def _rounds(receiver: Receiver, sim: dict[str, Any], rounds: int, load: tuple[int, int, int]) -> list[Values]:
    traced = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
    }
    with ExitStack() as stack:
        graphs: Mapping[str, Running] = {
            which: stack.enter_context(served("graphs.agg:Frontend", config(sim, {}), env=env))
            for which, env in ((OFF, {}), (ON, traced))
        }
        found = []
        for n in range(1 + rounds):
            order = list(graphs) if n % 2 else list(reversed(graphs))
            found.append({which: _cpu_per_token(graphs[which], *load) for which in order})
        return found[1:]


def _cpu_per_token(graph: Running, count: int, tokens: int, concurrency: int) -> float:
    """In µs."""
    pids = {name: pid for name, pid in graph.pids().items() if name in OURS}
    plan = {"kind": "beside", "port": graph.port, "model": "sim-tiny", "count": count, "tokens": tokens}
    found = generate({**plan, "concurrency": concurrency, "pids": pids})
    return sum(found["cpu_s"].values()) / found["tokens"] * 1e6
