"""One run: the graph, the client beside it, and lanes of scale actions on its three kinds of workers at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.deployment import Running, served
from benchmarks.drain.client import ANSWER_S, Plan
from benchmarks.drain.facts import OURS, POLICIES, Facts, Policy, read_notes, read_records
from benchmarks.drain.host import Host
from benchmarks.drain.profile import write_profile
from benchmarks.processes import ROOT, module_command
from benchmarks.traces import conversation

GRAPHS = Path(__file__).parents[1]
GPUS = 8
DECODE, PREFILL, PROCESSOR = "VllmWorker", "PrefillWorker", "Processor"
OTHERS = POLICIES[1:]


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a run is. Seconds are of the wall clock; `speed` divides the engines' time and the others' budgets.

    Decode workers go from `decode` down by `per_wave` and up again, wave after wave. Every `others_every`-th wave
    is one of the others' policies, each worker of it by another one. It ends when `actions` of ours are done.
    """

    speed: float = 10.0
    thinning: int = 3
    answer_max: int = 600
    actions: int = 1000
    decode: int = 6
    per_wave: int = 4
    others_every: int = 5
    ramp_s: float = 4.0
    between_s: float = 0.5
    prefill_every_s: float = 10.0
    processor_every_s: float = 5.0
    probe_every_s: float = 0.5
    crashes: int = 20


LONG = Shape()
SHORT = Shape(
    actions=40,
    thinning=3,
    answer_max=250,
    per_wave=5,
    others_every=2,
    ramp_s=2.0,
    between_s=0.3,
    prefill_every_s=4.0,
    processor_every_s=6.0,
    crashes=3,
)


def config(shape: Shape, profile: Path, notes: Path) -> dict[str, Any]:
    """The disaggregated graph on eight simulated GPUs; every prompt is prefilled remotely while the queue is short."""
    sim = {"speed": shape.speed, "profile": str(profile)}
    notes_env = {"BENCH_NOTES": str(notes)}

    def args(workers: int, gpus: int) -> dict[str, Any]:
        return {"workers": workers, "resources": {"gpu": gpus}, "envs": notes_env}

    return {
        "Host": {"gpus": f"sim:{GPUS}", "restart": {"first-s": 0.2, "max-s": 0.2, "failures-max": 1000}},
        "Frontend": {"port": 0, "ServiceArgs": {"envs": notes_env}},
        PROCESSOR: {"ServiceArgs": {"workers": 2, "envs": notes_env}},
        DECODE: {
            "sim": sim,
            "remote_prefill": True,
            "conditional_disagg": True,
            "max_local_prefill_length": 10,
            "max_prefill_queue_size": 4,
            "ServiceArgs": args(shape.decode, 1),
        },
        PREFILL: {"sim": sim, "ServiceArgs": args(GPUS - shape.decode, 1)},
    }


def measure(shape: Shape) -> Facts:
    """Start everything, scale, and take it down again. RuntimeError or TimeoutError where that does not work."""
    facts = Facts(shape.speed, trace=conversation(1).name)
    with tempfile.TemporaryDirectory(prefix="dyn-bench-") as name:
        folder = Path(name)
        notes = folder / "notes"
        notes.mkdir()
        profile = write_profile(folder / "profile")
        with served("graphs.noted:Frontend", config(shape, profile, notes), cwd=GRAPHS) as running:
            plan = Plan(running.port, shape.speed, shape.thinning, shape.answer_max)
            with _client(plan, folder / "records.jsonl"):
                begin_s = time.monotonic()
                asyncio.run(_scale(running, facts, shape))
                facts.lasted_s = time.monotonic() - begin_s
            asyncio.run(_crash(Host(running, facts), shape.crashes))
        facts.records = read_records(folder / "records.jsonl")
        facts.sent = list(read_notes(notes))
    return facts


@contextmanager
def _client(plan: Plan, records: Path) -> Iterator[None]:
    """The client, from its start to its last answer. RuntimeError with its last words if it fails."""
    command = module_command("benchmarks.drain.client", json.dumps(asdict(plan)), str(records))
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield
            _, errors = process.communicate(timeout=2 * ANSWER_S)
            if process.returncode != 0:
                raise RuntimeError(f"the client failed: {errors.strip()[-1000:]}")
        finally:
            process.kill()


async def _scale(running: Running, facts: Facts, shape: Shape) -> None:
    host = Host(running, facts)
    lanes = _Lanes(host, facts, shape)
    beside: set[asyncio.Task[None]] = set()
    # A watcher that fails ends the run: what it noted would not be whole, and half an hour would tell nothing.
    async with asyncio.TaskGroup() as group:
        beside.add(group.create_task(host.follow(running.environment())))
        beside.add(group.create_task(host.probe(shape.probe_every_s)))
        await asyncio.sleep(2 * shape.ramp_s)  # until streams are in flight
        async with asyncio.TaskGroup() as scaling:
            scaling.create_task(lanes.decode())
            scaling.create_task(lanes.pairs(PREFILL, shape.prefill_every_s))
            scaling.create_task(lanes.pairs(PROCESSOR, shape.processor_every_s))
        for task in beside:
            task.cancel()
    facts.unasked = host.unasked()
    facts.cpu_s = _cpu_s(running.status["arbiter_pid"])


async def _crash(host: Host, times: int) -> None:
    for _ in range(times):
        await host.crash(DECODE)


class _Lanes:
    """The steps in their order. The lanes of different components do not know of each other."""

    def __init__(self, host: Host, facts: Facts, shape: Shape) -> None:
        self._host = host
        self._facts = facts
        self._shape = shape

    def _done(self) -> bool:
        ours = [down for down in self._facts.downs if down.policy == OURS]
        ups = [up for up in self._facts.ups if up.with_policy == OURS]
        return len(ours) + len(ups) >= self._shape.actions

    async def decode(self) -> None:
        """Waves of decode workers."""
        shape, number = self._shape, 0
        while not self._done():
            number += 1
            if number % shape.others_every == 0:
                await self._wave(OTHERS, "others")
            else:
                await self._wave([POLICIES[0]] * shape.per_wave, OURS, take_back=True)

    async def _wave(self, policies: Sequence[Policy], name: str, *, take_back: bool = False) -> None:
        host, shape = self._host, self._shape
        if take_back:
            down = await host.down(DECODE, POLICIES[0], shape.speed)
            await asyncio.sleep(shape.between_s)
            await host.take_back(down)
            await host.gone(down)
        async with asyncio.TaskGroup() as group:
            for policy in policies:
                group.create_task(self._end_one(policy))
                await asyncio.sleep(shape.between_s)
        async with asyncio.TaskGroup() as group:
            for _ in policies:
                group.create_task(host.up(DECODE, name))
                await asyncio.sleep(shape.between_s)
        await asyncio.sleep(shape.ramp_s)

    async def _end_one(self, policy: Policy) -> None:
        down = await self._host.down(DECODE, policy, self._shape.speed)
        await self._host.gone(down)

    async def pairs(self, component: str, every_s: float) -> None:
        """One down, its end, one up; then a pause."""
        while not self._done():
            down = await self._host.down(component, POLICIES[0], self._shape.speed)
            await self._host.gone(down)
            await self._host.up(component)
            await asyncio.sleep(every_s)


def _cpu_s(arbiter_pid: int) -> float:
    """CPU seconds of the arbiter, of all processes it has, and of those that it has had."""
    arbiter = psutil.Process(arbiter_pid)
    times = [process.cpu_times() for process in (arbiter, *arbiter.children())]
    return sum(part.user + part.system + part.children_user + part.children_system for part in times)
