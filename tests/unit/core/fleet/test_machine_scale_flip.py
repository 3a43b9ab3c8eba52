"""The machine: several workers that change their role in one decision (`dynamo scale A -1 B +1 --flip`)."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet import events as st
from dynamo_local.errors import BadTarget, DynamoError, LastReadyWorker, NotFlippable
from tests.fakes.arbiter.fleet_views import PREFILL, on_ledger, worker
from tests.fakes.arbiter.machine import Life


def scale_flip(gives: str, takes: str, count: int, *, force: bool = False) -> st.ScaleFlip:
    """`dynamo scale GIVES -N TAKES +N --flip`"""
    return st.ScaleFlip(stimulus_id="s", gives=gives, takes=takes, count=count, force=force)


def test_a_component_gives_what_another_takes() -> None:
    """Those that a scale-down would take, the highest suffix first; in one decision."""
    life = Life(on_ledger([worker(n, "ready") for n in range(3)] + [worker(0, "ready", PREFILL)], 6))
    life.feed(scale_flip("VllmWorker", "PrefillWorker", 2))
    assert life.states() == ["ready", "flipping", "flipping"]
    assert (life.fleet.capacity("VllmWorker"), life.fleet.capacity("PrefillWorker")) == (1, 3)


@pytest.mark.parametrize(
    ("gives", "takes", "count", "refusal"),
    [
        ("VllmWorker", "PrefillWorker", 2, LastReadyWorker),
        ("VllmWorker", "PrefillWorker", 3, BadTarget),
        ("VllmWorker", "Frontend", 1, NotFlippable),
        ("Frontend", "VllmWorker", 1, NotFlippable),
    ],
)
def test_all_of_them_or_none(gives: str, takes: str, count: int, refusal: type[DynamoError]) -> None:
    life = Life(on_ledger([worker(0, "ready"), worker(1, "ready"), worker(0, "ready", PREFILL)], 4))
    with pytest.raises(refusal):
        life.feed(scale_flip(gives, takes, count))
    assert life.states() == ["ready", "ready"]
