"""The machine: a worker either sleeps or changes its role, and is told which of the two is in the way."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet import events as st
from dynamo_local.errors import NotFlippable, NotSleepable, NotWakeable
from tests.fakes.arbiter.fleet_views import name
from tests.fakes.arbiter.machine import Life
from tests.fakes.sleepers import asleep, order, sleep, some, told, wake


def flip(n: int = 1) -> st.Flip:
    """`dynamo flip`, forced: no prefill worker is there."""
    return st.Flip(stimulus_id="flip:1", name=name(n), force=True)


def flipping() -> Life:
    """`_1` changes its role at this moment."""
    life = some("ready", "ready")
    life.feed(flip())
    assert life.state(1) == "flipping"
    return life


def test_a_sleep_of_one_that_changes_its_role_is_refused() -> None:
    life = flipping()
    before = life.fleet
    with pytest.raises(NotSleepable, match="is flipping: only a ready worker can be put to sleep"):
        life.feed(sleep())
    with pytest.raises(NotWakeable, match="is flipping, and not asleep"):
        life.feed(wake())
    assert life.fleet == before


@pytest.mark.parametrize("state", ["falling_asleep", "sleeping", "waking"])
def test_a_flip_of_one_on_standby_is_refused(state: str) -> None:
    life = some("ready", "ready") if state == "falling_asleep" else asleep("ready", "ready")
    if state == "falling_asleep":
        life.feed(sleep())
    if state == "waking":
        life.feed(wake())
    assert life.state(1) == state
    before = life.fleet
    with pytest.raises(NotFlippable, match=f"is {state}: only a worker that is ready"):
        life.feed(flip())
    assert life.fleet == before


def test_once_awake_it_flips() -> None:
    life = asleep("ready", "ready")
    life.feed(wake())
    told(life, order=order(life), asleep=False)
    life.feed(flip())
    assert life.state(1) == "flipping"
