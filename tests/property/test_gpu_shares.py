"""Whatever is measured: models that share the GPUs keep the bounds, none starves, and none changes without need."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mixes.made import FAMILIES, SIZES, mix_of
from dynamo_local.core.gpu_shares import ModelNow, Share, Sharing, shares
from dynamo_local.simulator.mix import Engine, Mix, Request, Shared, World

GPUS = 8


@st.composite
def sharings(draw: st.DrawFn) -> Sharing:
    floor = draw(st.integers(0, 2))
    return Sharing(
        floor=floor,
        cap=draw(st.none() | st.integers(floor, 6)),
        weight=draw(st.floats(0.01, 100)),
        idle_s=draw(st.floats(0, 600)),
        min_stay_s=draw(st.floats(0, 60)),
        max_wait_s=draw(st.floats(5, 300)),
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[ModelNow]:
    """Models whose workers and floors fit on the GPUs."""
    models, left = list[ModelNow](), GPUS
    for number in range(draw(st.integers(1, 6))):
        sharing, gpus = draw(sharings()), draw(st.sampled_from([1, 1, 2, 4]))
        fits = left // gpus if sharing.cap is None else min(sharing.cap, left // gpus)
        workers = draw(st.integers(min(sharing.floor, fits), fits))
        sharing = replace(sharing, floor=min(sharing.floor, workers))
        left -= workers * gpus
        held = draw(st.integers(0, 50))
        models.append(
            ModelNow(
                name=str(number),
                sharing=sharing,
                gpus=gpus,
                workers=workers,
                requests=draw(st.integers(0, 200)) if workers else 0,
                held=held,
                held_s=draw(st.floats(0, 400)) if held else 0.0,
                rate=draw(st.floats(0, 100)),
                rate_long=draw(st.floats(0, 100)),
                rate_sd=draw(st.floats(0, 10)),
                busy_s=draw(st.floats(0.01, 60)),
                slots=draw(st.integers(1, 64)),
                slack_s=draw(st.floats(0.01, 30)),
                arrives_s=draw(st.floats(0.1, 90)),
                stayed_s=draw(st.none() | st.floats(0, 100)),
                young=draw(st.none() | st.integers(0, workers)),
                unused_s=draw(st.floats(0, 1000)),
            )
        )
    return models


def _urgent(models: Sequence[ModelNow]) -> list[ModelNow]:
    """Models with held requests that would have waited too long, if their worker were not ordered now."""
    return [each for each in models if each.held and each.held_s + each.arrives_s >= each.sharing.max_wait_s]


def _gpus(models: Sequence[ModelNow], decided: Mapping[str, Share]) -> int:
    return sum(decided[each.name].workers * each.gpus for each in models)


def test_a_held_request_takes_an_idle_worker_for_which_little_is_expected() -> None:
    """A person who asks one model after the other waits for a start, and not until the request is urgent."""
    asking = ModelNow(name="b", held=1, held_s=1.0, arrives_s=5.0)
    idle = ModelNow(name="a", workers=1, rate_long=0.01, busy_s=8.0, unused_s=20.0, stayed_s=60.0, arrives_s=5.0)
    assert {name: share.workers for name, share in shares([idle, asking], 1).items()} == {"a": 0, "b": 1}
    for busier in (replace(idle, rate_long=0.2), replace(idle, requests=1), replace(idle, stayed_s=1.0)):
        assert shares([busier, asking], 1)["a"].workers == 1


@given(fleets(), fleets())
def test_models_without_load_are_decided_by_what_they_say_that_counts(
    models: list[ModelNow], others: list[ModelNow]
) -> None:
    """The arbiter decides once for all fleets that are equal in this."""
    still = [replace(each, requests=0, held=0, held_s=0.0, rate=0.0, rate_long=0.0) for each in models]
    keys = [each.when_idle for each in still]
    assert None not in keys
    changed = [
        replace(each, rate_sd=other.rate_sd, busy_s=other.busy_s, slots=other.slots, slack_s=other.slack_s)
        for each, other in zip(still, itertools.cycle(others), strict=False)
    ]
    assert [each.when_idle for each in changed] == keys
    assert {name: share.workers for name, share in shares(changed, GPUS).items()} == {
        name: share.workers for name, share in shares(still, GPUS).items()
    }


@given(fleets(), st.integers(0, GPUS))
def test_budget_floors_and_caps_hold(models: list[ModelNow], gpus: int) -> None:
    decided = shares(models, gpus)
    assert _gpus(models, decided) <= gpus
    for each in models:
        if each.sharing.cap is not None:
            assert decided[each.name].workers <= each.sharing.cap
        if sum(other.sharing.floor * other.gpus for other in models) <= gpus:
            assert decided[each.name].workers >= each.sharing.floor


@given(fleets())
def test_no_model_starves_whatever_the_others_do(models: list[ModelNow]) -> None:
    """All urgent models get a worker where they fit beside the floors; else only urgent ones keep others out."""
    decided, urgent = shares(models, GPUS), _urgent(models)
    able = [each for each in urgent if each.sharing.cap != 0]
    lacking = [each for each in able if not decided[each.name].workers]
    for each in lacking:
        needed = {other.name: max(other.sharing.floor, int(other.held > 0)) * other.gpus for other in models}
        needed[each.name] = each.gpus
        assert sum(needed.values()) > GPUS


@given(fleets())
def test_no_worker_is_taken_within_its_stay_but_for_a_request_that_would_wait_too_long(models: list[ModelNow]) -> None:
    decided = shares(models, GPUS)
    drain_s = max(each.busy_s for each in models)
    others = [
        each for each in models if each.held and each.held_s + each.arrives_s + drain_s + 1 >= each.sharing.max_wait_s
    ]
    for each in models:
        if decided[each.name].workers < each.locked:
            assert any(other is not each for other in others)


@given(fleets())
def test_the_same_decision_on_the_decided_fleet_changes_nothing(models: list[ModelNow]) -> None:
    decided = shares(models, GPUS)
    after = []
    for each in models:
        now, more = decided[each.name].workers, decided[each.name].workers - each.workers
        young = None if each.young is None else max(0, min(each.young, now)) + max(0, more)
        after.append(replace(each, workers=now, young=young))
    again = shares(after, GPUS)
    assert {name: share.workers for name, share in again.items()} == {
        name: share.workers for name, share in decided.items()
    }


@given(fleets())
def test_models_that_nobody_used_give_back_what_is_above_their_floor(models: list[ModelNow]) -> None:
    idle = [
        replace(each, requests=0, held=0, held_s=0.0, young=0, unused_s=each.sharing.idle_s + 1.0) for each in models
    ]
    decided = shares(idle, GPUS)
    assert [decided[each.name].workers for each in idle] == [each.sharing.floor for each in idle]


engines = st.builds(
    Engine,
    gpus=st.sampled_from([1, 1, 2]),
    slots=st.integers(1, 8),
    prefill_s=st.just(1e-4),
    alone_s=st.just(0.01),
    grows=st.just(4.0),
    ttft_s=st.floats(0.2, 5),
    itl_s=st.just(0.03),
    start_s=st.floats(10, 60),
    wake_s=st.floats(0.5, 5),
    sleep_s=st.floats(0.5, 1),
    parked=st.integers(0, 2),
)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[Mix, list[Request]]:
    """Few models on few GPUs, with requests in heaps."""
    models = draw(st.lists(engines, min_size=1, max_size=4))
    one = st.builds(
        Request,
        st.floats(0, 200),
        st.integers(0, len(models) - 1),
        st.integers(8, 4000),
        st.integers(2, 300),
    )
    requests = sorted(draw(st.lists(one, min_size=1, max_size=80)), key=lambda each: each.at_s)
    sharing = Sharing(min_stay_s=draw(st.floats(0, 20)), max_wait_s=draw(st.floats(20, 120)))
    sharing_models = tuple(replace(each, sharing=sharing) for each in models)
    return Mix(gpus=draw(st.integers(2, 4)), engines=sharing_models, length_s=200.0), requests


@settings(max_examples=40, deadline=None)
@given(mixes())
def test_a_run_drops_cuts_and_reorders_no_request(made: tuple[Mix, list[Request]]) -> None:
    mix, requests = made
    result = World(mix, requests, Shared()).run()
    assert result.finished == len(requests)
    for model in range(len(mix.engines)):
        mine = [number for number, each in enumerate(requests) if each.model == model]
        assert [number for number in result.served if number in set(mine)] == mine


class Wants(Shared):
    """Wants so many workers of each model, whatever comes."""

    def __init__(self, targets: Sequence[int]) -> None:
        self._targets = targets

    def targets(self, world: World, now_s: float) -> Sequence[int]:
        return self._targets


def test_a_judged_model_that_lacks_workers_loses_none() -> None:
    """One more is wanted than fit. Seen: each second all but one of such a model's workers were taken."""
    mix = mix_of("zipf", "3 on 8", 2)
    most = mix.gpus // mix.engines[0].gpus
    assert World(mix, mix.at(0.2), Wants([most + 1, 0, 0])).run().switches == 0


def test_there_are_mixes_of_each_family() -> None:
    assert {"phases", "bursts", "zipf", "hot"} == set(FAMILIES)
    assert SIZES["12 on 8"] == (12, 8)
