"""Which worker a request goes to, by what it costs there."""

from __future__ import annotations

from dynamo_local.components.dispatcher import make_picker
from dynamo_local.core.routing.choice import LeastLoaded, Sample
from dynamo_local.core.routing.decode_choice import SloPicker, even
from dynamo_local.core.routing.estimates import Costs, Targets, Timing
from dynamo_local.core.types import Load, Missing
from dynamo_local.profile.interpolation import FixedModel, ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE

PERF = FixedModel(prefill_ms_per_token=0.1, decode_ms=10.0, decode_ms_per_kv_token=0.001, max_kv_tokens=100_000)
COSTS = Costs(Timing(PERF), Targets(2.0, 0.05))


def make(*, hears_ends: bool = True) -> SloPicker:
    return SloPicker(COSTS.timing, COSTS.targets, hears_ends=hears_ends)


def sample(active: int = 0, usage: float = 0.0, slots: int = 256, at_s: float = 1.0) -> Sample:
    return Sample(Load(active, slots, int(usage * 1000), 1000, 0, usage), at_s)


def test_fewer_tokens_of_kv_win() -> None:
    assert make().pick([1, 2], {1: sample(4, 0.5), 2: sample(4, 0.1)}, prompt_tokens=100) == 2


def test_a_prefix_that_is_held_is_worth_its_prefill() -> None:
    loads = {1: sample(4, 0.01), 2: sample(4, 0.005)}
    assert make().pick([1, 2], loads, {}, prompt_tokens=5_000) == 2
    assert make().pick([1, 2], loads, {1: 0.95}, prompt_tokens=5_000) == 1


def test_a_worker_without_room_comes_last() -> None:
    assert make().pick([1, 2], {1: sample(10, 0.1, slots=10), 2: sample(100, 0.2)}, prompt_tokens=100) == 2
    assert make().pick([1, 2], {1: sample(1, 0.95), 2: sample(90, 0.8)}, prompt_tokens=10_000) == 2


def test_a_burst_is_spread() -> None:
    """What was sent since the sample counts, at once."""
    picker, loads = make(), {i: sample() for i in range(4)}
    got = []
    for number in range(32):
        got.append(picker.pick(range(4), loads, prompt_tokens=1000))
        picker.routed(got[-1], str(number), 100, 1.0, 1000)
    assert [got.count(i) for i in range(4)] == [8] * 4
    for number, worker in enumerate(got):
        picker.finished(worker, str(number), 2.0)
    assert picker.pick([2], {}) == 2


def test_missing_is_not_idle() -> None:
    nothing = Sample(Missing("no load yet"), 1.0)
    unknown = Sample(Load(1, 256, gpu_cache_usage_perc=Missing("not told")), 1.0)
    for missing in (nothing, unknown):
        assert make().pick([1, 2, 3], {1: missing, 2: sample(3, 0.2), 3: sample(9, 0.9)}) == 2
    assert make().pick([1, 2], {2: sample(3, 0.2)}) in (1, 2)


def test_gaps_that_workers_publish_correct_the_profile() -> None:
    """Once for each load, within the bound."""
    picker = make()
    for number in range(300):
        load = Load(4, 256, 100, 1000, 0, 0.1, itl_ms=30.0)
        picker.pick([1], {1: Sample(load, float(number))})
        picker.pick([1], {1: Sample(load, float(number))})
    assert 1.4 < picker.correction.factor < 1.6  # 30 ms where the profile says 20


def test_the_plane_orders_workers_as_the_profile_does() -> None:
    """Where the measured surface says that one is clearly slower (by a fifth), the plane agrees."""
    timing = Timing(ProfileModel.load(DEFAULT_PROFILE))
    plane, most = even(timing), timing.perf.max_kv_tokens
    places = [
        (int(most * share / context), int(most * share)) for share in (0.05, 0.1, 0.2, 0.4) for context in (4096, 8192)
    ]
    compared = 0
    for one in places:
        for other in places:
            if timing.itl_s(*one) > 1.2 * timing.itl_s(*other):
                compared += 1
                assert plane.itl_s(*one) > plane.itl_s(*other)
    assert compared > 10


def test_without_a_profile_slo_is_least_loaded() -> None:
    assert isinstance(make_picker("slo"), LeastLoaded)
    assert isinstance(make_picker("slo", costs=COSTS), SloPicker)
