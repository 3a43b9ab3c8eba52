"""On a host with an NVIDIA card: what NVML and CUDA really do. No torch: libcuda through ctypes, in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from dynamo_local.core.gpus import GpuDevice, GpuLedger, cuda_visible_devices, occupant
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError
from dynamo_local.serve.inventory import Inventory, open_inventory

pytestmark = pytest.mark.gpu

HOLD_BYTES = 1024**3
SEEN_WITHIN_S = 20.0
"""NVML shows an allocation at once and a death when the driver has torn the context down: a second or two."""

HOLDER = """
import ctypes, sys, uuid

cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code != 0:
        sys.exit(f"{name}: CUDA error {code}")

count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
pointer, identity = ctypes.c_uint64(), (ctypes.c_ubyte * 16)()
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDeviceGetUuid", ctypes.byref(identity), device)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1])))
print(count.value, f"GPU-{uuid.UUID(bytes=bytes(identity))}", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class Held:
    """What the child saw: its number of devices, and the UUID of the one it holds memory on."""

    devices: int
    uuid: str


@contextmanager
def holding(device: GpuDevice) -> Iterator[Held]:
    """A process pinned to the device by UUID that holds memory on it until the block ends."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": cuda_visible_devices([device])}
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(HOLD_BYTES)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline().split()
        if len(line) != 2:
            child.kill()
            pytest.fail(f"the child could not hold memory: {child.communicate(timeout=10)[1]}")
        yield Held(int(line[0]), line[1])
    finally:
        child.kill()
        child.communicate(timeout=10)


@pytest.fixture
def inventory() -> Iterator[Inventory]:
    """The host's GPUs; skips where there are none."""
    found = open_inventory(None, os.environ)
    try:
        found.sample()
    except GpuError as error:
        pytest.skip(f"needs an NVIDIA card: {error}")
    yield found
    found.close()


@pytest.fixture
def idle(inventory: Inventory) -> GpuDevice:
    """A device that nobody is on; skips where all are busy."""
    devices = inventory.sample()
    for device in devices:
        if occupant(device) is None:
            return device
    pytest.skip(f"needs an idle GPU; they are held by {[occupant(device) for device in devices]}")


def sample_until(inventory: Inventory, uuid: str, condition: Callable[[GpuDevice], bool]) -> GpuDevice:
    """Sample until the device fulfils the condition. NVML has no event for this: it is asked again."""
    deadline_s = time.monotonic() + SEEN_WITHIN_S
    while True:
        (device,) = (device for device in inventory.sample() if device.uuid == uuid)
        if condition(device):
            return device
        assert time.monotonic() < deadline_s, f"not seen within {SEEN_WITHIN_S} s: {device}"
        time.sleep(0.02)


def test_the_real_inventory_is_complete(inventory: Inventory) -> None:
    """Every device has a UUID, a name, memory and a process list, and two samples agree on the identity."""
    devices = inventory.sample()
    assert devices
    for device in devices:
        assert device.uuid.startswith("GPU-")
        assert device.name
        assert not isinstance(device.memory_total_bytes, Missing)
        assert not isinstance(device.memory_used_bytes, Missing)
        assert not isinstance(device.processes, Missing)
        assert 0 <= device.memory_used_bytes < device.memory_total_bytes
    assert [device.uuid for device in devices] == [device.uuid for device in inventory.sample()]


def test_an_idle_device_can_be_allocated(inventory: Inventory, idle: GpuDevice) -> None:
    """The driver's own reserve does not make an idle card look taken."""
    assert idle.uuid in {device.uuid for device in GpuLedger(inventory.sample()).free()}


def test_a_process_that_holds_memory_is_a_stranger(inventory: Inventory, idle: GpuDevice) -> None:
    """lesson 4: its GPU is not handed out while it lives, and returned memory is noticed when it is gone."""
    with holding(idle):
        busy = sample_until(inventory, idle.uuid, lambda device: occupant(device) is not None)
        assert not isinstance(busy.memory_used_bytes, Missing)
        assert busy.memory_used_bytes >= HOLD_BYTES
        ledger = GpuLedger(inventory.sample())
        assert idle.uuid not in {device.uuid for device in ledger.free()}
        with pytest.raises(GpuError, match=f"GPU {idle.index} .* is held by"):
            ledger.allocate("dynamo_VllmWorker", len(ledger.devices()))
    sample_until(inventory, idle.uuid, lambda device: occupant(device) is None)
    ledger.observe(inventory.sample())
    assert idle.uuid in {device.uuid for device in ledger.free()}


def test_a_worker_pinned_by_uuid_sees_one_device(idle: GpuDevice) -> None:
    """CUDA_VISIBLE_DEVICES with a full UUID leaves exactly that device."""
    with holding(idle) as held:
        assert held == Held(devices=1, uuid=idle.uuid)


def test_the_callers_choice_by_uuid_prefix_is_honoured(idle: GpuDevice) -> None:
    """A unique prefix of a UUID in CUDA_VISIBLE_DEVICES selects its device, for us as for CUDA."""
    found = open_inventory(None, {"CUDA_VISIBLE_DEVICES": idle.uuid[:13]})
    try:
        assert [device.uuid for device in found.sample()] == [idle.uuid]
    finally:
        found.close()
