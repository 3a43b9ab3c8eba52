"""Measures the ways, round by round, on a graph of each."""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.actuators.ways import WAKE_S, WAYS, Way
from benchmarks.harness import Report, at_most
from dynamo_local.components.messages import generate_request
from dynamo_local.core.lead_times import Rung
from dynamo_local.engines.vllm.checking import is_installed
from dynamo_local.ports import SamplingParams
from tests.drivers.endpoint_client import endpoint_client
from tests.drivers.served import ROOT, Served

COLD_SHARE_TARGET = 1 / 3
FLIP_TARGET_S = 0.5
WAKE_BEYOND_TARGET_S = 0.05
"""Beyond what the engine is configured to take."""
FLIPS = (Rung.FLIP_TO_DECODE, Rung.FLIP_TO_PREFILL)
TOKEN_IDS = [300, 301, 302, 303, 304, 305, 306, 307]
FIRST_TOKEN_TIMEOUT_S = 600.0

MakeServed = Callable[[Way], Served]


def run(short: bool) -> Report:
    """Seconds of each way on each engine."""
    report = Report("actuators")
    rounds = 2 if short else 10
    _measured(report, "sim", asyncio.run(_measure(_on_sim, rounds)))
    if is_installed():
        from tests.vllm.make_tiny_model import make

        with tempfile.TemporaryDirectory(prefix="ba-") as folder:
            model = make(Path(folder) / "tiny", sorted((ROOT / "docs").glob("*.md")))
            ways = [way for way in WAYS if way.on_vllm]
            found = asyncio.run(_measure(lambda way: _on_vllm(model, way), 1 if short else 5, ways))
            _measured(report, "vLLM (CPU)", found)
    else:
        report.notes.append("vLLM is not installed here: tests/vllm/install.sh VENV installs its CPU build")
    return report


def _measured(report: Report, engine: str, found: dict[Rung, list[float]]) -> None:
    """Of a flip to prefill the first token is that of the canary's prompt: all that a prefill worker answers with."""
    for rung, seconds in found.items():
        report.add(f"{engine}, {rung}: command to first token", "s", seconds)
        if rung in FLIPS:
            p99_s = sorted(seconds)[max(0, math.ceil(0.99 * len(seconds)) - 1)]
            report.add(f"{engine}, {rung}: p99 of {len(seconds)}", "s", [p99_s], at_most(FLIP_TARGET_S))
        if rung is Rung.WAKE_1:
            beyond = [one - WAKE_S for one in seconds]
            report.add(f"{engine}, {rung}: beyond wake_s", "s", beyond, at_most(WAKE_BEYOND_TARGET_S))
    cold_s = statistics.median(found[Rung.COLD])
    for rung, seconds in found.items():
        if rung is not Rung.COLD:
            report.add(
                f"{engine}, {rung}: of a cold start",
                "",
                [statistics.median(seconds) / cold_s],
                at_most(COLD_SHARE_TARGET),
            )


def _on_sim(way: Way) -> Served:
    return Served(*way.words, target=way.target, namespace=f"bench-{way.rung.replace('_', '-')}")


def _on_vllm(model: Path, way: Way) -> Served:
    from tests.vllm.hosts import cpu_host

    folder = model.parent / str(way.rung)
    folder.mkdir()
    return cpu_host(model).aggregated(folder, words=way.words)


async def _measure(make: MakeServed, rounds: int, ways: Sequence[Way] = WAYS) -> dict[Rung, list[float]]:
    """Each way in turn, in every round. The first worker of a name fills caches: a round before is not counted."""
    found: dict[Rung, list[float]] = {way.rung: [] for way in ways}
    with ExitStack() as stack:
        graphs = []
        for way in ways:
            served = stack.enter_context(make(way))
            await asyncio.to_thread(served.start)
            graphs.append((way, served))
        for n in range(rounds + 1):
            for way, served in graphs:
                for each, other in graphs:  # what imports elsewhere would take the processors from what is measured
                    await each.prepare(other)
                for turn in range(way.times if n else 1):
                    if turn:
                        await way.prepare(served)
                    seconds = await _first_token(way, served)
                    await way.undo(served)
                    if n:
                        found[way.rung].append(seconds)
    return found


async def _first_token(way: Way, served: Served) -> float:
    """From the command until the new instance has given its first token, asked for as soon as it is registered."""
    async with asyncio.timeout(FIRST_TOKEN_TIMEOUT_S), endpoint_client(served, way.component, way.endpoint) as client:
        known = {instance.instance_id for instance in await client.wait_for_instances(FIRST_TOKEN_TIMEOUT_S)}
        began_s = time.perf_counter()
        await way.begin(served)
        await client.wait_for_others(known, FIRST_TOKEN_TIMEOUT_S)
        new = next(each.instance_id for each in client.instances() if each.instance_id not in known)
        request = generate_request("bench", TOKEN_IDS, SamplingParams(max_tokens=2, ignore_eos=True))
        stream = await client.call(request, instance_id=new)
        async for item in stream:
            if way.endpoint == "canary" or item.get("token_ids"):
                break
        took_s = time.perf_counter() - began_s
        async for _ in stream:
            pass
    return took_s
