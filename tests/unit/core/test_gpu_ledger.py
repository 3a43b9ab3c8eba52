"""The ledger: who holds which device, who may not have one, and what is said when there are too few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dynamo_local.core.gpus import (
    EXACT_SEARCH_MAX,
    GpuAsk,
    GpuDevice,
    GpuLedger,
    GpuProcess,
    best_set,
    occupant,
    plan,
    plan_on,
)
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import SimInventory

GIB = 1024**3


def devices(count: int = 8) -> tuple[GpuDevice, ...]:
    """Simulated: NUMA nodes of four with NVLink inside."""
    return SimInventory(count).sample()


def ledger_of(count: int = 8) -> GpuLedger:
    """Nobody holds anything."""
    return GpuLedger.of(devices(count))


def indices(chosen: tuple[GpuDevice, ...]) -> list[int]:
    return [device.index for device in chosen]


def given(ledger: GpuLedger, name: str, count: int) -> tuple[GpuLedger, list[int]]:
    """`allocate`, and the indices that it gave."""
    ledger = ledger.allocate(name, count)
    return ledger, indices(ledger.held[name])


def test_a_tensor_parallel_worker_gets_connected_devices() -> None:
    assert given(ledger_of().allocate("a", 1), "b", 4)[1] == [4, 5, 6, 7]


def test_single_devices_do_not_break_up_a_connected_set() -> None:
    """Best fit: after one single, the next ones come from the same node, so that the other stays whole."""
    ledger = ledger_of()
    for n, name in enumerate("abcd"):
        ledger, chosen = given(ledger, name, 1)
        assert chosen == [n]
    assert given(ledger, "tp4", 4)[1] == [4, 5, 6, 7]


def test_the_strongest_pair_wins_over_the_lowest_index() -> None:
    links = {(2, 3): 1004, (0, 1): 10}

    def score(a: int, b: int) -> int:
        return links.get((min(a, b), max(a, b)), 0)

    assert best_set(4, 2, score) == (2, 3)


def test_the_weakest_link_counts_before_the_sum() -> None:
    strong = {(0, 1): 5000, (0, 2): 5000, (1, 2): 10}

    def score(a: int, b: int) -> int:
        return strong.get((min(a, b), max(a, b)), 1000 if min(a, b) >= 3 else 0)

    assert best_set(6, 3, score) == (3, 4, 5)


def test_above_the_exact_limit_a_connected_set_is_still_found() -> None:
    total = EXACT_SEARCH_MAX + 8

    def score(a: int, b: int) -> int:
        return 1018 if a // 4 == b // 4 else 10

    assert best_set(total, 4, score) == (0, 1, 2, 3)
    assert best_set(total, 0, score) == ()


@pytest.mark.parametrize(("total", "count"), [(2, 3), (2, -1)])
def test_a_set_that_cannot_exist_is_a_programming_error(total: int, count: int) -> None:
    with pytest.raises(ValueError, match="cannot choose"):
        best_set(total, count, lambda a, b: 0)


def test_a_released_device_can_be_had_again() -> None:
    empty = ledger_of(2)
    full = empty.allocate("a", 2)
    assert (full.held, full.free) == ({"a": devices(2)}, ())
    assert full.release("a") == empty
    assert empty.release("a") == empty


def test_a_ledger_is_a_value() -> None:
    ledger = ledger_of(3).allocate("a", 1)
    before = (ledger.held, ledger.free, ledger.quarantined, ledger.taken)
    first, second, _ = devices(3)
    ledger.allocate("b", 1), ledger.assign("c", [second.uuid]), ledger.release("a"), ledger.observe([first])
    ledger.quarantine(first.uuid, "test"), ledger.reserved_elsewhere(second.uuid, "other")
    assert (ledger.held, ledger.free, ledger.quarantined, ledger.taken) == before


def test_a_dead_workers_device_is_not_free_until_its_memory_is_back() -> None:
    """Released, but NVML still shows memory in use: not handed out; memory returned: free again."""
    (device,) = devices(1)
    ledger = ledger_of(1).allocate("a", 1).release("a").observe([replace(device, memory_used_bytes=70 * GIB)])
    assert ledger.free == ()
    with pytest.raises(GpuError, match=r"70\.0 GiB in use by processes that cannot be seen"):
        ledger.allocate("b", 1)
    assert given(ledger.observe([device]), "b", 1)[1] == [0]


def test_a_strangers_device_is_not_handed_out() -> None:
    """A process list that is not empty, or used memory above the bound, keeps a device back."""
    first, second, third = devices(3)
    process = GpuProcess(4711, "python", 20 * 1024**2)
    ledger = GpuLedger.of([replace(first, processes=(process,)), replace(second, memory_used_bytes=GIB), third])
    assert indices(ledger.free) == [2]
    assert ledger.taken == {
        first.uuid: "pid 4711 python (0.0 GiB)",
        second.uuid: "1.0 GiB in use by processes that cannot be seen from here",
    }


def test_a_little_memory_or_a_desktop_is_no_stranger() -> None:
    desktop = GpuProcess(12, "Xorg", 40 * 1024**2, "graphics")
    (device,) = devices(1)
    assert occupant(replace(device, memory_used_bytes=512 * 1024**2, processes=(desktop,))) is None
    assert occupant(replace(device, memory_used_bytes=600 * 1024**2, processes=(desktop,))) == "pid 12 Xorg (0.0 GiB)"


def test_a_device_that_cannot_be_seen_into_is_not_handed_out() -> None:
    (device,) = devices(1)
    unknown = Missing("not supported")
    assert occupant(replace(device, processes=unknown)) is None
    blind = GpuLedger.of([replace(device, processes=unknown, memory_used_bytes=unknown)])
    assert blind.free == ()


def test_a_held_device_may_be_busy() -> None:
    first, second = devices(2)
    ledger = ledger_of(2).allocate("a", 1).observe([replace(first, memory_used_bytes=70 * GIB), second])
    assert indices(ledger.held["a"]) == [0]
    assert ledger.taken == {}


def test_another_namespaces_device_is_not_handed_out() -> None:
    first, _ = devices(2)
    ledger = GpuLedger.of(devices(2), elsewhere={first.uuid: "namespace other (watcher other_W, arbiter pid 9)"})
    ledger, chosen = given(ledger, "a", 1)
    assert chosen == [1]
    with pytest.raises(GpuError, match=r"GPU 0 .* is held by namespace other"):
        ledger.allocate("b", 1)
    assert indices(ledger.observe(devices(2)).free) == [0], "the next sample may say otherwise"


def test_a_device_that_another_namespace_was_quicker_with_is_not_handed_out() -> None:
    first, _ = devices(2)
    ledger = ledger_of(2).reserved_elsewhere(first.uuid, "namespace other")
    assert ledger.taken == {first.uuid: "namespace other"}
    assert given(ledger, "a", 1)[1] == [1]


def test_a_quarantined_device_is_not_handed_out_until_restored() -> None:
    first, _ = devices(2)
    ledger = ledger_of(2).allocate("a", 1).quarantine(first.uuid, "memory did not come back")
    assert ledger.held == {}
    assert indices(ledger.free) == [1]
    with pytest.raises(GpuError, match=r"GPU 0 .* is quarantined: memory did not come back"):
        ledger.allocate("b", 2)
    assert indices(ledger.restore(first.uuid).free) == [0, 1]


def test_a_vanished_device_is_not_handed_out() -> None:
    """One that fell off the bus is shown as such and comes back with the next sample that has it."""
    ledger = ledger_of(2).observe(devices(2)[:1])
    assert indices(ledger.free) == [0]
    assert ledger.taken == {devices(2)[1].uuid: "nobody: it is not seen on this host any more"}
    assert indices(ledger.observe(devices(2)).free) == [0, 1]


def test_adoption_assigns_exact_devices_even_if_busy() -> None:
    busy = [replace(device, memory_used_bytes=GIB) for device in devices(2)]
    ledger = GpuLedger.of(busy).assign("a", [busy[1].uuid])
    assert indices(ledger.held["a"]) == [1]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ledger: ledger.assign("a", ["GPU-nowhere"]), "not on this host; there are: 0 "),
        (lambda ledger: ledger.assign("b", [devices(1)[0].uuid]), "cannot go to b: holder holds it"),
        (lambda ledger: ledger.assign("b", [devices(3)[2].uuid]), r"is quarantined \(test\) and cannot go to b"),
        (lambda ledger: ledger.assign("b", [devices(2)[1].uuid] * 2), "names a GPU twice"),
        (lambda ledger: ledger.allocate("holder", 1), "already holds"),
        (lambda ledger: ledger.allocate("b", -1), "0 or more are possible"),
        (lambda ledger: ledger.allocate("b", 2), "too few GPUs: 2 needed, 1 of 3 free"),
        (lambda ledger: ledger.quarantine("GPU-nowhere", "x"), "not on this host"),
        (lambda ledger: ledger.restore(devices(1)[0].uuid), "is not quarantined"),
        (lambda ledger: ledger.observe([devices(1)[0]] * 2), "share a UUID"),
        (lambda ledger: plan_on(ledger, [GpuAsk("b", "B", 1), GpuAsk("b", "B", 1)]), "asked for twice"),
        (lambda ledger: plan_on(ledger, [GpuAsk("holder", "B", 1)]), "already holds"),
        (lambda ledger: plan_on(ledger, [GpuAsk("b", "B", -1)]), "B asks for -1 GPUs per worker"),
        (lambda ledger: plan_on(ledger, [GpuAsk("b", "B", 1), GpuAsk("c", "C", 1)]), "2 needed, 1 of 3 free"),
    ],
)
def test_a_refusal_changes_nothing(act: Callable[[GpuLedger], object], message: str) -> None:
    ledger = ledger_of(3).allocate("holder", 1).quarantine(devices(3)[2].uuid, "test")
    before = (ledger.held, ledger.quarantined, ledger.free)
    with pytest.raises(GpuError, match=message):
        act(ledger)
    assert (ledger.held, ledger.quarantined, ledger.free) == before


def test_a_plan_serves_larger_asks_first_and_keeps_the_order_given() -> None:
    """The pair is chosen before the singles, wherever it stands in the list; an ask of 0 gets none."""
    asks = [GpuAsk("d_F", "F", 0), GpuAsk("d_P", "P", 1), GpuAsk("d_V", "V", 2), GpuAsk("d_V_1", "V", 2)]
    result = plan(devices(5), asks)
    assert list(result) == ["d_F", "d_P", "d_V", "d_V_1"]
    assert {name: indices(chosen) for name, chosen in result.items()} == {
        "d_F": [],
        "d_P": [4],
        "d_V": [0, 1],
        "d_V_1": [2, 3],
    }


def test_no_index_is_invented_past_the_physical_count() -> None:
    """Three asks on two devices are refused, naming the asks and that there are two."""
    with pytest.raises(GpuError, match="too few GPUs: 3 needed, 2 of 2 free"):
        plan(devices(2), [GpuAsk(f"d_V_{n}", "V", 1) for n in range(3)])


def test_the_shortage_names_asks_per_worker_and_holders() -> None:
    """`gpu: 3` is per worker, and the one-line message says so, with who holds what."""
    first, second, third, fourth = devices(4)
    seen = [replace(first, processes=(GpuProcess(77, "train", 70 * GIB),)), second, third, fourth]
    elsewhere = {second.uuid: "namespace other (watcher other_W, arbiter pid 9)"}
    ledger = GpuLedger.of(seen, elsewhere=elsewhere).allocate("dynamo_Router", 1)
    asks = [GpuAsk("d_V", "VllmWorker", 3), GpuAsk("d_V_1", "VllmWorker", 3), GpuAsk("d_P", "PrefillWorker", 1)]
    with pytest.raises(GpuError) as caught:
        plan_on(ledger, asks)
    assert str(caught.value) == (
        "too few GPUs: 7 needed, 1 of 4 free; "
        "VllmWorker asks for 3 GPUs per worker x 2 workers = 6; "
        "PrefillWorker asks for 1 GPU per worker x 1 worker; "
        f"GPU 2 ({third.uuid}) is held by dynamo_Router; "
        f"GPU 0 ({first.uuid}) is held by pid 77 train (70.0 GiB); "
        f"GPU 1 ({second.uuid}) is held by namespace other (watcher other_W, arbiter pid 9); "
        "ask for less (`gpu` counts devices per worker) or free some"
    )
