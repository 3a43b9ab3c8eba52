"""Simulated devices, and the options that choose an inventory."""

from __future__ import annotations

import pytest

from dynamo_local.core.gpus import LINK_NVLINK, LINK_SYSTEM, cuda_visible_devices, link_score, occupant
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import SimInventory, open_inventory, pinning_disabled


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
