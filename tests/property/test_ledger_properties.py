"""Tests what holds for every sequence of allocations."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.gpus import GpuAsk, GpuLedger, best_set, link_score, plan
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import SimInventory

NAMES = ["a", "b", "c", "d"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.sampled_from(NAMES), st.integers(-1, 5)),
        st.tuples(st.just("release"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("quarantine"), st.just(""), st.integers(0, 7)),
        st.tuples(st.just("restore"), st.just(""), st.integers(0, 7)),
        st.tuples(st.just("reserved"), st.just(""), st.integers(0, 7)),
        st.tuples(st.just("stranger"), st.just(""), st.integers(0, 7)),
        st.tuples(st.just("idle"), st.just(""), st.integers(0, 7)),
        st.tuples(st.just("vanish"), st.just(""), st.integers(0, 7)),
    ),
    max_size=30,
)


def step(ledger: GpuLedger, act: str, name: str, number: int) -> GpuLedger:
    """The ledger after one act; a refusal is part of the game."""
    devices = ledger.devices
    chosen = devices[number % len(devices)]
    busy = replace(chosen, memory_used_bytes=2**36)
    samples = {
        "stranger": [busy if device is chosen else device for device in devices],
        "idle": [replace(device, memory_used_bytes=0) if device is chosen else device for device in devices],
        "vanish": [device for device in devices if device is not chosen],
    }
    try:
        if act == "allocate":
            return ledger.allocate(name, number)
        if act == "release":
            return ledger.release(name)
        if act == "quarantine":
            return ledger.quarantine(chosen.uuid, "test")
        if act == "restore":
            return ledger.restore(chosen.uuid)
        if act == "reserved":
            return ledger.reserved_elsewhere(chosen.uuid, "namespace other")
        return ledger.observe(samples[act])
    except GpuError:
        return ledger


@given(count=st.integers(1, 8), steps=STEPS)
def test_each_device_is_in_exactly_one_place(count: int, steps: list[tuple[str, str, int]]) -> None:
    physical = {device.uuid for device in SimInventory(count).sample()}
    ledger = GpuLedger.of(SimInventory(count).sample())
    for act, name, number in steps:
        before, held_before = ledger, dict(ledger.held_uuids)
        ledger = step(ledger, act, name, number)
        assert before.held_uuids == held_before, "a ledger is a value"
        held = [device.uuid for devices in ledger.held.values() for device in devices]
        free = [device.uuid for device in ledger.free]
        places = [*held, *free, *ledger.quarantined, *ledger.taken]
        assert len(places) == len(set(places))
        assert set(places) == physical


@given(count=st.integers(0, 8), sizes=st.lists(st.integers(0, 4), max_size=6))
def test_a_plan_fits_or_is_refused(count: int, sizes: list[int]) -> None:
    devices = SimInventory(count).sample()
    asks = [GpuAsk(f"w{n}", "W", size) for n, size in enumerate(sizes)]
    try:
        result = plan(devices, asks)
    except GpuError:
        assert sum(sizes) > count
        return
    given_out = [device.uuid for chosen in result.values() for device in chosen]
    assert [len(chosen) for chosen in result.values()] == sizes
    assert len(given_out) == len(set(given_out)) == sum(sizes)


@given(st.data())
def test_no_set_has_a_stronger_weakest_link(data: st.DataObject) -> None:
    total = data.draw(st.integers(2, 7))
    count = data.draw(st.integers(2, total))
    pairs = list(combinations(range(total), 2))
    drawn = data.draw(st.lists(st.integers(0, 5), min_size=len(pairs), max_size=len(pairs)))
    scores = dict(zip(pairs, drawn, strict=True))

    def score(a: int, b: int) -> int:
        return scores[min(a, b), max(a, b)]

    def weakest(chosen: tuple[int, ...]) -> int:
        return min(score(a, b) for a, b in combinations(chosen, 2))

    best = best_set(total, count, score)
    assert weakest(best) == max(weakest(chosen) for chosen in combinations(range(total), count))
    assert best == best_set(total, count, score)


@given(a=st.integers(0, 7), b=st.integers(0, 7))
def test_link_scores_are_symmetric(a: int, b: int) -> None:
    devices = SimInventory(8).sample()
    assert link_score(devices[a], devices[b]) == link_score(devices[b], devices[a])
