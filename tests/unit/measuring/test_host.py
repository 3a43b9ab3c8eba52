"""Tests what a host does beside the engines that are measured."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dynamo_local.core.gpus import GpuDevice, GpuProcess
from dynamo_local.core.types import Missing
from dynamo_local.engines.base import host_bytes
from dynamo_local.measuring import host
from dynamo_local.measuring.host import HostWatch, Ours, gpu_bytes, processors, share_processors
from dynamo_local.system.gpus import SimInventory
from dynamo_local.system.processes import cpu_s, family_of
from tests.drivers.served import until

SPIN = "import os\nif os.fork():\n    os.wait()\nelse:\n    while True:\n        pass"


@contextmanager
def spinning() -> Iterator[int]:
    """A worker-like process, in a session of its own, whose child uses a processor as far as it gets one."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    try:
        until(lambda: len(family_of(process.pid)) == 2, 30.0, what="its child")
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@contextmanager
def idling() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


class Devices:
    """An inventory of what a test says."""

    simulated = False

    def __init__(self, *devices: GpuDevice) -> None:
        self.devices = devices
        self.sampled = 0

    def sample(self) -> tuple[GpuDevice, ...]:
        self.sampled += 1
        return self.devices

    def close(self) -> None:
        """See `Inventory`."""


def device(index: int, *processes: GpuProcess) -> GpuDevice:
    return GpuDevice(index, f"GPU-{index}", "H100", 80 * 2**30, 0, processes)


def test_a_process_is_one_family_with_its_children_and_their_time_is_seen():
    with spinning() as pid:
        family = family_of(pid)
        assert pid in family
        assert os.getpid() not in family
        until(lambda: sum(cpu_s(each) for each in family) > 0.1, 60.0, what="its work")
        assert host_bytes(family) > 2**20
    assert family_of(pid) == set()


async def test_only_what_others_use_counts_as_a_busy_host(monkeypatch):
    monkeypatch.setattr(host, "EVERY_S", 0.3)
    shares = {}
    with spinning() as pid, idling() as idle:
        for whose, pids in (("ours", frozenset({pid})), ("another's", frozenset({idle}))):
            watch = HostWatch(lambda pids=pids: Ours(pids, frozenset()))
            async with watch.watching(), asyncio.timeout(60.0):
                while watch.elapsed_s < 1.5:
                    await asyncio.sleep(0.05)
            shares[whose] = (watch.busy_s, watch.ours_s)
    busy_s, ours_s = shares["ours"]
    assert 0.05 < ours_s <= busy_s + 0.1, "of 1.5 s: a starved host gave it 0.1"
    busy_s, ours_s = shares["another's"]
    assert ours_s < 0.5 * busy_s


async def test_a_stranger_beside_a_worker_is_noticed_and_a_neighbour_elsewhere_is_not(monkeypatch):
    """On a measured device; where not even the worker is seen, pids are another container's, and nothing is said."""
    monkeypatch.setattr(host, "EVERY_S", 0.01)
    with spinning() as pid:
        own, other = GpuProcess(pid, "python", 2**30), GpuProcess(1, "miner", 2**30)
        desktop = GpuProcess(1, "Xorg", 2**20, "graphics")
        devices = Devices(device(0, own, other, desktop), device(1, other), device(2, other))
        watch = HostWatch(lambda: Ours(frozenset({pid}), frozenset({"GPU-0", "GPU-1"})), devices)
        async with watch.watching(), asyncio.timeout(60.0):
            while devices.sampled < 2:
                await asyncio.sleep(0.01)
        found = [each.text for each in watch.noticed() if each.kind == "stranger"]
    assert len(found) == 1
    assert "GPU 0 was also used by miner (pid 1)" in found[0]


@pytest.mark.parametrize(
    ("memory", "told"), [((2**30, 2**29), 2**30 + 2**29), ((2**30, Missing("not reported")), None), ((), None)]
)
def test_gpu_memory_of_a_worker_is_that_of_its_processes_or_not_known(memory, told):
    pid = os.getpid()
    devices = tuple(device(n, GpuProcess(pid, "python", used)) for n, used in enumerate(memory))
    assert gpu_bytes(pid, devices) == told


def test_engines_on_simulated_gpus_share_the_processors_unless_they_are_simulated_themselves():
    """vLLM's CPU build beside a `gpus: sim:8`: its times are those of the processors, which are named."""
    assert share_processors({"vllm"}, SimInventory(8))
    assert not share_processors({"sim"}, SimInventory(8))
    assert not share_processors({"vllm"}, Devices())
    [told] = processors()
    assert told.kind == "on_processors"
    assert f"compute on {len(os.sched_getaffinity(0))} × " in told.text
