"""One more mocker of Dynamo 1.x: from a scale decision to routable, beside starting it by hand, in turn in one run.

Both clocks end when the new worker's key is seen in Dynamo's own registry (`v1/instances/…/generate/…`), by the same
watch of etcd: from then on its frontend routes to it. Started by hand: the same command in the same environment, begun
right before the process is made. Started by decision: begun right before `dynamo_scale` is sent to the arbiter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import yaml

from benchmarks.deployment import Running, served
from benchmarks.harness import Report, at_most
from benchmarks.processes import ROOT
from dynamo_local.cli.common import ask_arbiter
from dynamo_local.components.commands import dynamo_1x_env
from dynamo_local.components.commands.launch import words_of
from dynamo_local.components.commands.ports import Ports
from dynamo_local.ports import DeleteEvent, PutEvent, SnapshotEvent
from dynamo_local.system.paths import Paths

EXAMPLE = ROOT / "examples" / "dynamo_1x"
TARGET_RATIO = 1.2
INSTANCES = "v1/instances/dynamo/backend/generate/"
WAIT_S = 60.0
COMMAND_TIMEOUT_S = 20.0


def installed() -> bool:
    """ai-dynamo's mocker can be started here."""
    with contextlib.suppress(ModuleNotFoundError):
        return find_spec("dynamo.mocker") is not None
    return False


def run(short: bool) -> Report:
    """Milliseconds to a routable worker, and how many times as long as by hand a decision takes."""
    report = Report("dynamo_1x")
    if not installed():
        report.notes.append("not run: ai-dynamo is not installed here (docs/dynamo-1x.md says how)")
        return report
    by_hand, scaled = asyncio.run(_measure(3 if short else 20))
    report.add("by hand: command to routable", "ms", by_hand)
    report.add("scale decision to routable", "ms", scaled)
    ratios = (decided / started for decided, started in zip(scaled, by_hand, strict=True))
    report.add("decision ÷ by hand", "", ratios, at_most(TARGET_RATIO))
    return report


async def _measure(rounds: int) -> tuple[list[float], list[float]]:
    config = yaml.safe_load((EXAMPLE / "agg.yaml").read_text())
    config["Frontend"]["ports"]["http"] = 0
    by_hand, scaled = [], []
    with served(None, config, cwd=EXAMPLE) as graph:
        paths = Paths.of("dynamo", graph.folders.env)
        command = [word.replace("{model}", config["Mocker"]["model"]) for word in words_of(config["Mocker"]["command"])]
        async with _registry(graph) as seen:
            await seen.until(1)
            for n in range(1 + rounds):
                hand_ms = await _by_hand(command, _environment(graph, paths), seen)
                decision_ms = await _by_decision(paths, seen)
                if n > 0:  # the first round warms the page cache
                    by_hand.append(hand_ms)
                    scaled.append(decision_ms)
    return by_hand, scaled


class _Seen:
    """Dynamo's registered workers, as etcd tells of them."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.changed = asyncio.Event()

    async def until(self, count: int) -> float:
        """`time.perf_counter()` when there are that many. TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while len(self.keys) != count:
                self.changed.clear()
                await self.changed.wait()
        return time.perf_counter()

    async def follow(self, store: Any) -> None:
        """For ever."""
        async for event in store.watch_prefix(INSTANCES):
            if isinstance(event, SnapshotEvent):
                self.keys = {kv.key for kv in event.kvs}
            elif isinstance(event, PutEvent):
                self.keys.add(event.kv.key)
            elif isinstance(event, DeleteEvent):
                self.keys.discard(event.key)
            self.changed.set()


@asynccontextmanager
async def _registry(graph: Running) -> AsyncIterator[_Seen]:
    from dynamo_local.transport.access import EtcdAccess
    from dynamo_local.transport.etcd import EtcdStore

    env = graph.environment()
    store, seen = await EtcdStore.connect(env["ETCD_ENDPOINTS"], access=EtcdAccess.of(env)), _Seen()
    following = asyncio.create_task(seen.follow(store))
    try:
        yield seen
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()


def _environment(graph: Running, paths: Paths) -> dict[str, str]:
    """The environment that a person would set before starting one by hand."""
    return {
        **graph.folders.env,
        "DYN_NAMESPACE": "dynamo",
        **graph.environment(),
        "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}",
    }


async def _by_hand(command: list[str], env: Mapping[str, str], seen: _Seen) -> float:
    ports = Ports("by-hand", (dynamo_1x_env.SYSTEM_PORT, dynamo_1x_env.RPC_PORT), {})
    whole = {**env, **dynamo_1x_env.environment(ports.numbers, env)}
    count = len(seen.keys)
    begin_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, cwd=EXAMPLE, env=whole, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        end_s = await seen.until(count + 1)
    finally:
        process.terminate()
        async with asyncio.timeout(WAIT_S):
            await process.wait()
        ports.close()
    await seen.until(count)
    return (end_s - begin_s) * 1e3


async def _by_decision(paths: Paths, seen: _Seen) -> float:
    count = len(seen.keys)
    begin_s = time.perf_counter()
    asking = asyncio.create_task(_scale(paths, "+1"))
    end_s = await seen.until(count + 1)
    await asking
    await _settled(paths, 2)
    await _scale(paths, "1")
    await _settled(paths, 1)
    await seen.until(count)
    return (end_s - begin_s) * 1e3


async def _scale(paths: Paths, target: str) -> None:
    await asyncio.to_thread(ask_arbiter, paths, "dynamo_scale", COMMAND_TIMEOUT_S, component="Mocker", target=target)


async def _settled(paths: Paths, count: int) -> None:
    """So many mockers, all of them ready."""
    async with asyncio.timeout(WAIT_S):
        while True:
            status = (await asyncio.to_thread(ask_arbiter, paths, "dynamo_status"))["graph"]
            states = [worker["state"] for worker in status["workers"] if worker["component"] == "Mocker"]
            if states == ["ready"] * count:
                return
            await asyncio.sleep(0.02)
