"""The policy `slo` on its ladder: cold starts for what is far, wakes for what is near, flips for the split."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.types import Load
from dynamo_local.planner.policies.slo.scaling_options import (
    COLD_START,
    FLIP,
    WAKE,
    Ahead,
    Bounds,
    Fleet,
    Moment,
    Quick,
    ScalingOption,
    climbed,
    quick,
    scaling_options_of,
)
from dynamo_local.planner.queueing import Shares
from dynamo_local.planner.values import Pool, Reading, WorkerPools

BOUNDS = Bounds((1, 1), (1, 1), 8)
PRICE = 0.1


def needs(prefill: int, decode: int, rate: float = 10.0) -> Moment:
    """All is served by so many, and each worker less loses its part."""
    shares = Shares(*(tuple(min(1.0, n / role) for n in range(17)) for role in (prefill, decode)))
    return Moment(((rate, shares),))


def ladder(far: Moment, wake: Moment | None = None, flip: Moment | None = None) -> Sequence[Ahead]:
    """Seven moments to a cold start, the last as `far`; two to a wake; one to a flip."""
    near = flip or wake or far
    found = [Ahead(ScalingOption(COLD_START, 30.0), far, (*[near] * 6, far))]
    found += [Ahead(ScalingOption(WAKE, 3.0), wake, (near, wake))] if wake else []
    found += [Ahead(ScalingOption(FLIP, 0.5), flip, (flip,))] if flip else []
    return found


def fleet_of(now: Fleet, ahead: Sequence[Ahead], has: Quick) -> Fleet:
    return climbed(now, ahead, has, PRICE, BOUNDS)[0]


def test_a_trend_is_met_by_starts_and_what_was_not_foreseen_by_sleepers() -> None:
    calm, more, asleep = needs(2, 2), needs(4, 2), Quick((2, 2), asleep=(2, 0))
    assert fleet_of((2, 2), ladder(more), Quick((2, 2))) == (4, 2)
    assert fleet_of((2, 2), ladder(more, wake=calm), asleep) == (4, 2)
    assert fleet_of((2, 2), ladder(calm, wake=more), Quick((2, 2))) == (2, 2)
    assert fleet_of((2, 2), ladder(calm, wake=more), asleep) == (4, 2)
    assert fleet_of((2, 2), ladder(calm, wake=more), Quick((2, 2), asleep=(1, 0))) == (3, 2)


def test_a_worker_is_held_over_a_pause_whoever_sleeps() -> None:
    """A sleeper that is woken is replaced by a start: it saves none, and is missing when a burst comes."""
    far, near = needs(3, 2), needs(2, 2)
    for asleep in ((0, 0), (1, 0)):
        assert fleet_of((3, 2), ladder(far, wake=near), Quick((3, 2), asleep=asleep)) == (3, 2)


def test_a_mix_that_changes_is_followed_by_flips_within_the_same_gpus() -> None:
    mix = needs(2, 6)
    ahead = ladder(mix, flip=mix)
    assert climbed((4, 4), ahead, Quick((4, 4), flippable=(3, 3)), PRICE, BOUNDS) == ((2, 6), 2)
    assert climbed((4, 4), ahead, Quick((4, 4), flippable=(1, 3)), PRICE, BOUNDS) == ((3, 5), 1)
    assert climbed((4, 4), ahead, Quick((4, 4)), PRICE, BOUNDS) == ((4, 4), 0)
    back = needs(6, 2)
    assert climbed((4, 4), ladder(back, flip=back), Quick((4, 4), flippable=(3, 3)), PRICE, BOUNDS) == ((6, 2), -2)


def test_gpus_that_are_always_on_are_all_held_and_only_their_split_moves() -> None:
    idle, mix, has = needs(1, 1, rate=0.01), needs(2, 6), Quick((4, 4), flippable=(3, 3))
    always = Bounds((1, 1), (1, 1), 8, min_gpus=8)
    assert sum(climbed((4, 4), ladder(idle), Quick((4, 4)), PRICE, BOUNDS)[0]) == 2
    assert climbed((4, 4), ladder(idle, flip=idle), has, PRICE, always) == ((4, 4), 0)
    assert climbed((4, 4), ladder(mix, flip=mix), has, PRICE, always) == ((2, 6), 2)
    assert climbed((1, 1), ladder(mix), Quick((1, 1)), PRICE, always)[0] == (2, 6)


def test_a_split_that_gains_next_to_nothing_stays() -> None:
    mix = Moment(((0.05, needs(2, 6).scenarios[0][1]),))
    assert climbed((4, 4), ladder(mix, flip=mix), Quick((4, 4), flippable=(3, 3)), PRICE, BOUNDS)[1] == 0


def pools(flippable: int = 3, lead_times: dict[str, float] | None = None) -> WorkerPools:
    return WorkerPools(
        Pool("P", 1, 4, flippable=3, lead_times=lead_times or {}),
        Pool("D", 1, 4, asleep=1, flippable=flippable, start_up_s=40.0),
    )


def reading(*usages: float, waiting: int = 0) -> Reading:
    loads = {
        f"D_{number}": Load(
            request_active_slots=1,
            request_total_slots=256,
            kv_active_blocks=1,
            kv_total_blocks=100,
            num_requests_waiting=waiting,
            gpu_cache_usage_perc=usage,
            gpu_prefix_cache_hit_rate=0.0,
        )
        for number, usage in enumerate(usages)
    }
    return Reading(0.0, 0, loads)


def test_no_decode_worker_flips_whose_kv_the_others_cannot_bear() -> None:
    assert quick(pools(), reading(0.1, 0.1, 0.1, 0.1)).flippable == (3, 3)
    assert quick(pools(), reading(0.5, 0.5, 0.5, 0.5)).flippable == (3, 1)
    assert quick(pools(), reading(0.7, 0.7, 0.7, 0.7)).flippable == (3, 0)
    assert quick(pools(), reading(0.1, 0.1, 0.1, 0.1, waiting=1)).flippable == (3, 0)
    assert quick(pools(), reading(0.1, 0.1, 0.1)).flippable == (3, 0)  # one of them did not tell


def test_scaling_options_are_those_that_there_are_with_leads_as_they_were_seen() -> None:
    bare = WorkerPools(Pool("P", 1, 1), Pool("D", 1, 1))
    assert scaling_options_of(bare, 30.0) == (ScalingOption(COLD_START, 30.0),)
    seen = scaling_options_of(pools(lead_times={"wake_1": 2.5, "flip_to_prefill": 0.25}), 30.0)
    assert seen == (ScalingOption(COLD_START, 40.0), ScalingOption(WAKE, 2.5), ScalingOption(FLIP, 0.25))
    # Nobody sleeps at this moment, and nobody may flip: what was learned of these lead_times stays.
    assert [option.name for option in scaling_options_of(bare, 30.0, seen)] == [COLD_START, WAKE, FLIP]
