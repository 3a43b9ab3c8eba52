"""The inventory of GPUs: the real `pynvml` over a fake libnvidia-ml, and simulated devices."""

from __future__ import annotations

import pynvml
import pytest

from dynamo_local.core.gpus import (
    LINK_NODE,
    LINK_NVLINK,
    LINK_SINGLE,
    LINK_SYSTEM,
    GpuProcess,
    cuda_visible_devices,
    link_score,
    occupant,
)
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import NvmlInventory, SimInventory, open_inventory, pinning_disabled
from tests.fakes.arbiter.nvml import GIB, FakeGpu, install


def uuids(*letters: str) -> list[FakeGpu]:
    """One idle GPU for each letter."""
    return [FakeGpu(uuid=f"GPU-{letter * 8}-0000", bus_id=f"00000000:0{i}:00.0") for i, letter in enumerate(letters)]


def test_a_device_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu("GPU-a", used=3 * GIB, compute=[(4711, 2 * GIB)], graphics=[(12, None)], numa_mask=0b10)
    install(monkeypatch, [gpu], names={4711: "/usr/bin/python3", 12: "/usr/lib/Xorg"})
    (device,) = open_inventory(None, {}).sample()
    assert (device.index, device.uuid, device.name) == (0, "GPU-a", "Fake H200")
    assert (device.memory_total_bytes, device.memory_used_bytes, device.numa_node) == (80 * GIB, 3 * GIB, 1)
    assert device.processes == (
        GpuProcess(12, "Xorg", Missing("not reported"), "graphics"),
        GpuProcess(4711, "python3", 2 * GIB),
    )


def test_the_drivers_own_reserve_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [FakeGpu("GPU-a", used=0, reserved=600 * 1024**2)])
    (device,) = open_inventory(None, {}).sample()
    assert device.memory_used_bytes == 0
    assert occupant(device) is None


def test_an_old_driver_falls_back_to_the_first_memory_call(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [FakeGpu("GPU-a", used=GIB, reserved=0, unsupported={"nvmlDeviceGetMemoryInfo_v2"})])
    assert open_inventory(None, {}).sample()[0].memory_used_bytes == GIB


def test_optional_calls_that_fail_give_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = {
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMemoryAffinity",
    }
    install(monkeypatch, [FakeGpu("GPU-a", unsupported=unsupported)])
    (device,) = open_inventory(None, {}).sample()
    for value in (device.memory_used_bytes, device.memory_total_bytes, device.processes, device.numa_node):
        assert isinstance(value, Missing)
        assert "Not Supported" in value.reason
    assert "nobody knows" in (occupant(device) or "")


def test_a_process_of_another_container_is_still_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    pid_max = 2**22 + 1  # above the kernel's limit: never a process of this host
    install(monkeypatch, [FakeGpu("GPU-a", compute=[(pid_max, None)])])
    (device,) = open_inventory(None, {}).sample()
    assert device.processes == (GpuProcess(pid_max, "(name not visible)", Missing("not reported")),)


def test_direct_nvlinks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wires between two GPUs, seen from both ends, are two; other pairs fall back to PCIe."""
    gpus = uuids("a", "b", "c")
    gpus[0].nvlink_to = [gpus[1].bus_id, gpus[1].bus_id]
    gpus[1].nvlink_to = [gpus[0].bus_id, gpus[0].bus_id]
    install(monkeypatch, gpus, levels={(1, 2): pynvml.NVML_TOPOLOGY_SINGLE})
    a, b, c = open_inventory(None, {}).sample()
    assert link_score(a, b) == LINK_NVLINK + 2
    assert link_score(b, c) == LINK_SINGLE
    assert link_score(a, c) == LINK_SYSTEM


def test_nvswitch_links_connect_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = uuids("a", "b")
    gpus[0].nvlink_to = ["switch"] * 18
    gpus[1].nvlink_to = ["switch"] * 12
    install(monkeypatch, gpus)
    a, b = open_inventory(None, {}).sample()
    assert link_score(a, b) == LINK_NVLINK + 12


def test_without_topology_the_numa_node_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = uuids("a", "b", "c")
    gpus[2].numa_mask = 0b10
    install(monkeypatch, gpus, levels=dict.fromkeys([(0, 1), (0, 2), (1, 2)], -1))
    a, b, c = open_inventory(None, {}).sample()
    assert (link_score(a, b), link_score(a, c)) == (LINK_NODE, 0)


def test_topology_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, uuids("a", "b"))
    inventory = open_inventory(None, {})
    inventory.sample()
    fake.calls.clear()
    inventory.sample()
    assert "nvmlDeviceGetMemoryInfo_v2" in fake.calls
    assert "nvmlDeviceGetTopologyCommonAncestor" not in fake.calls


def test_close_lets_the_driver_go_and_sample_opens_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, uuids("a"))
    inventory = open_inventory(None, {})
    inventory.sample()
    inventory.close()
    inventory.close()
    assert fake.initialised == 0
    assert len(inventory.sample()) == 1
    inventory.close()
    assert fake.initialised == 0


def test_a_driver_without_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [])
    with pytest.raises(GpuError, match="no GPU; on a machine without one use --gpus sim:8"):
        open_inventory(None, {}).sample()


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    inventory = open_inventory(None, {})
    with pytest.raises(GpuError, match=r"no usable NVIDIA driver here .*Not Found.*--gpus sim:8"):
        inventory.sample()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [0, 2]),
        ("0,-1,2", [0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-bbbbbbbb-0000", [1]),
        ("GPU-b,0", [0, 1]),
    ],
)
def test_cuda_visible_devices_is_honoured(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[int]
) -> None:
    install(monkeypatch, uuids("a", "b", "c"))
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [device.index for device in open_inventory(None, env).sample()] == expected


@pytest.mark.parametrize(
    ("gpus", "visible", "message"),
    [
        ("7", None, r"--gpus 7: there is no GPU '7'; this host has 0 \(GPU-aaaaaaaa-0000\), 1 .*, 2 "),
        ("GPU-x", None, r"there is no GPU 'GPU-x'; this host has 0 "),
        ("GPU-", None, r"'GPU-' fits more than one GPU"),
        ("1,1", None, r"GPU 1 \(GPU-bbbbbbbb-0000\) is named twice"),
        ("0,GPU-a", None, r"GPU 0 .* is named twice"),
        ("0", "1,2", r"your CUDA_VISIBLE_DEVICES hides 0 .* and leaves 1 .*, 2 "),
        (None, "9", r"CUDA_VISIBLE_DEVICES=9: there is no GPU '9'; this host has 0 "),
        (None, "MIG-1", r"MIG slice; whole GPUs only"),
    ],
)
def test_devices_that_do_not_exist_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, gpus: str | None, visible: str | None, message: str
) -> None:
    """An unknown index or UUID is refused, and the error names the devices that exist."""
    install(monkeypatch, uuids("a", "b", "c"))
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(GpuError, match=message):
        open_inventory(gpus, env).sample()


def test_the_option_selects_within_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, uuids("a", "b", "c"))
    inventory = open_inventory("2,GPU-b", {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert isinstance(inventory, NvmlInventory)
    assert [device.index for device in inventory.sample()] == [1, 2]


# --- inventory sim
# Simulated devices, and the options that choose an inventory.


def test_sim_devices_have_memory_and_a_topology() -> None:
    inventory = open_inventory("sim:8", {})
    devices = inventory.sample()
    assert isinstance(inventory, SimInventory)
    assert inventory.simulated
    assert [device.index for device in devices] == list(range(8))
    assert {device.memory_total_bytes for device in devices} == {80 * 1024**3}
    assert [device.numa_node for device in devices] == [0] * 4 + [1] * 4
    assert link_score(devices[0], devices[3]) > LINK_NVLINK
    assert link_score(devices[3], devices[4]) == LINK_SYSTEM
    assert {occupant(device) for device in devices} == {None}


def test_sim_devices_are_the_same_each_time() -> None:
    assert open_inventory("sim:8", {}).sample() == open_inventory("sim:8", {}).sample()
    assert open_inventory("sim:2", {}).sample()[1].uuid == open_inventory("sim:8", {}).sample()[1].uuid


def test_sim_uuids_fit_cuda_visible_devices() -> None:
    devices = open_inventory("sim:2", {}).sample()
    assert cuda_visible_devices(devices) == (
        "GPU-sim00000-0000-0000-0000-000000000000,GPU-sim00000-0000-0000-0000-000000000001"
    )


def test_sim_devices_do_not_mind_the_callers_cuda_visible_devices() -> None:
    assert len(open_inventory("sim:4", {"CUDA_VISIBLE_DEVICES": ""}).sample()) == 4


@pytest.mark.parametrize("option", ["sim", "sim:", "sim:0", "sim:-1", "sim:many", "sim:8x", "simulated", "sim:99999"])
def test_a_wrong_sim_option_is_refused(option: str) -> None:
    with pytest.raises(GpuError, match="write sim:<number>, for example sim:8"):
        open_inventory(option, {})


@pytest.mark.parametrize("option", ["-1", "0,x", "1.5", "0-3", "MIG-1", "cuda:0"])
def test_an_option_that_cannot_be_read_is_refused_at_once(option: str) -> None:
    with pytest.raises(GpuError, match="neither an index nor a UUID"):
        open_inventory(option, {})


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("true", True), ("YES", True), ("0", False), ("", False), ("false", False)]
)
def test_pinning_is_left_to_the_user_on_request(value: str, expected: bool) -> None:
    assert pinning_disabled({"DYN_DISABLE_AUTO_GPU_ALLOCATION": value}) is expected
    assert not pinning_disabled({})
