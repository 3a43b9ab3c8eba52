"""The behaviour of NVML and CUDA: who is on a card, and that memory which is returned is seen to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo_local.core.gpus import LINK_UNKNOWN, GpuDevice, GpuLedger, occupant
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import open_inventory
from tests.gpu.conftest import Cards, Held
from tests.gpu.holder import GIB

pytestmark = pytest.mark.gpu

Saw = Callable[..., None]


def test_the_real_inventory_is_complete(cards: Cards, saw: Saw) -> None:
    devices = cards.inventory.sample()
    saw(devices=[f"{device.index} {device.name} {device.uuid}" for device in devices])
    assert devices
    for device in devices:
        assert device.uuid.startswith("GPU-")
        assert device.name
        assert not isinstance(device.memory_total_bytes, Missing)
        assert not isinstance(device.memory_used_bytes, Missing)
        assert not isinstance(device.processes, Missing)
        assert 0 <= device.memory_used_bytes < device.memory_total_bytes
    assert [device.uuid for device in devices] == [device.uuid for device in cards.inventory.sample()]


def test_the_topology_is_the_same_from_both_ends(cards: Cards, saw: Saw) -> None:
    devices = cards.inventory.sample()
    saw(numa_nodes=[str(device.numa_node) for device in devices], links=[dict(device.links) for device in devices])
    for one in devices:
        assert one.uuid not in one.links
        assert isinstance(one.numa_node, int | Missing)
        for other in devices:
            if other is not one:
                assert one.links[other.uuid] == other.links[one.uuid] > LINK_UNKNOWN


def test_an_idle_device_can_be_allocated(cards: Cards, idle: GpuDevice, saw: Saw) -> None:
    saw(used_bytes=idle.memory_used_bytes)
    assert idle.uuid in {device.uuid for device in GpuLedger.of(cards.inventory.sample()).free}


def test_a_process_that_holds_memory_is_a_stranger(cards: Cards, idle: GpuDevice, saw: Saw) -> None:
    with cards.holding(idle):
        busy = cards.until(idle.uuid, lambda device: occupant(device) is not None)
        saw(occupant=occupant(busy))
        assert not isinstance(busy.memory_used_bytes, Missing)
        assert busy.memory_used_bytes >= GIB
        ledger = GpuLedger.of(cards.inventory.sample())
        assert idle.uuid not in {device.uuid for device in ledger.free}
        with pytest.raises(GpuError, match=f"GPU {idle.index} .* is held by"):
            ledger.allocate("dynamo_VllmWorker", len(ledger.devices))
    cards.until(idle.uuid, lambda device: occupant(device) is None)
    assert idle.uuid in {device.uuid for device in ledger.observe(cards.inventory.sample()).free}


def test_a_worker_pinned_by_uuid_sees_one_device(real_cards: Cards, idle: GpuDevice) -> None:
    with real_cards.holding(idle) as held:
        assert held == Held(devices=1, uuid=idle.uuid)


def test_the_callers_choice_by_uuid_prefix_is_honoured(cards: Cards, idle: GpuDevice) -> None:
    found = open_inventory(None, {"CUDA_VISIBLE_DEVICES": idle.uuid[:13]})
    try:
        assert [device.uuid for device in found.sample()] == [idle.uuid]
    finally:
        found.close()
