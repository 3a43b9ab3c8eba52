"""Measures the ways, round by round, on a graph of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.actuators.facts import Facts, OfEngine
from benchmarks.actuators.page import report
from benchmarks.actuators.ways import WAYS, Way
from benchmarks.harness import Report, machine
from dynamo_local.components.messages import generate_request
from dynamo_local.core.lead_times import OptionKind
from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.ports import SamplingParams
from tests.drivers.endpoint_client import endpoint_client
from tests.drivers.scaled import PATIENCE_S, names, settled
from tests.drivers.served import ROOT, Served, auntil
from tests.tools.free_port import free_port

if TYPE_CHECKING:
    from tests.vllm.hosts import VllmHost

STAGES = re.compile(r"the start took [\d.]+ s: (.*)$", re.MULTILINE)
TOKEN_IDS = [300, 301, 302, 303, 304, 305, 306, 307]
FIRST_TOKEN_TIMEOUT_S = 600.0
BY_HAND_ASKED_EVERY_S = 0.02

MakeServed = Callable[[Way], Served]


def run(short: bool) -> Report:
    """Seconds of each way on each engine."""
    return report(measure(short))


def measure(short: bool) -> Facts:
    """The simulated engine, and vLLM where it is installed."""
    rounds, load = 2 if short else 10, os.getloadavg()[0]
    facts = Facts(machine(), (load, load))
    facts.engines["simulated engine"] = asyncio.run(_measure(_on_sim, rounds))
    if is_installed():
        from tests.vllm.hosts import cpu_host
        from tests.vllm.make_tiny_model import make

        with tempfile.TemporaryDirectory(prefix="ba-") as folder:
            model = make(Path(folder) / "tiny", sorted((ROOT / "docs").glob("*.md")))
            ways = [way for way in WAYS if way.on_vllm]
            by_hand = partial(_by_hand, cpu_host(model))
            found = asyncio.run(_measure(lambda way: _on_vllm(model, way), 1 if short else 5, ways, by_hand))
        facts.engines["vLLM, CPU build, a tiny model"] = found
    else:
        facts.absent.append("vLLM was not installed there (tests/vllm/install.sh VENV installs its CPU build).")
    facts.load = load, os.getloadavg()[0]
    return facts


def _on_sim(way: Way) -> Served:
    return Served(*way.words, target=way.target, namespace=f"bench-{way.rung.replace('_', '-')}")


def _on_vllm(model: Path, way: Way) -> Served:
    from tests.vllm.hosts import cpu_host

    folder = model.parent / str(way.rung)
    folder.mkdir()
    return cpu_host(model).aggregated(folder, words=way.words)


def _by_hand(host: VllmHost) -> float:
    """Seconds from the start of `vllm serve`, with the same options, to its first token."""
    port = free_port()
    given = {"{model}": str(host.model), "{port:http}": str(port)}
    words = [given.get(word, word) for word in host.vllm_serve("tiny")]
    asked = {"model": "tiny", "prompt": TOKEN_IDS, "max_tokens": 2, "ignore_eos": True, "stream": True}
    program = str(Path(sys.executable).with_name("vllm"))
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client,
        subprocess.Popen(
            [program, *words[1:]], env={**os.environ, **host.env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process,
    ):
        try:
            began_s = time.perf_counter()
            while time.perf_counter() < began_s + FIRST_TOKEN_TIMEOUT_S:
                if process.poll() is not None:
                    raise RuntimeError(f"{program} serve ended with exit code {process.returncode}")
                with (
                    contextlib.suppress(httpx.ConnectError),
                    client.stream("POST", "/v1/completions", json=asked) as answer,
                ):
                    answer.raise_for_status()
                    next(line for line in answer.iter_lines() if line.startswith("data:"))
                    return time.perf_counter() - began_s
                time.sleep(BY_HAND_ASKED_EVERY_S)
            raise TimeoutError(f"{program} serve has given no token within {FIRST_TOKEN_TIMEOUT_S:g} s")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()


async def _measure(
    make: MakeServed, rounds: int, ways: Sequence[Way] = WAYS, by_hand: Callable[[], float] | None = None
) -> OfEngine:
    """Each way in turn, in every round. The first worker of a name fills caches: a round before is not counted."""
    found = OfEngine({way.rung: [] for way in ways}, {way.rung: [] for way in ways})
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
                    stages = await _stages(way, served)
                    await way.undo(served)
                    if n:
                        found.seconds[way.rung].append(seconds)
                        found.stages[way.rung] += stages
            if by_hand is not None:
                seconds = await asyncio.to_thread(by_hand)
                if n:
                    found.by_hand.append(seconds)
    return found


async def _stages(way: Way, served: Served) -> list[dict[str, float]]:
    """The stages of the start, by the line that the new worker writes; none where nothing was started."""
    if way.rung not in (OptionKind.COLD, OptionKind.PREWARMED):
        return []
    await settled(served, PATIENCE_S)
    log = Path(served.worker(names(served, way.component)[-1])["log_file"])
    line = (await auntil(lambda: STAGES.findall(log.read_text()), what=log.read_text))[-1]
    each = (word.rpartition(" ") for word in line.split(", "))
    return [{stage: float(seconds) for stage, _, seconds in each}]


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
