"""The machine: a worker that is not wanted any more before anybody has begun to make its process."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import Template
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, fleet, name, worker
from tests.fakes.arbiter.machine import Life


def scale(life: Life, count: int) -> list[str]:
    """`dynamo scale VllmWorker`; what follows."""
    change = Change(count, relative=True)
    return life.feed(st.Scale(stimulus_id=f"scale {count:+d}", component="VllmWorker", target=change))


def test_up_down_and_up_again_at_once_finds_its_gpu() -> None:
    life = Life(fleet("ready", gpus=2))
    assert scale(life, +1) == ["spawn VllmWorker_1"]
    assert scale(life, -1) == ["call off spawn VllmWorker_1", "forget VllmWorker_1"]
    assert (life.states(), life.free()) == (["ready"], [1])
    assert scale(life, +1) == ["spawn VllmWorker_1"]
    life.up(1)
    assert life.states() == ["ready", "ready"]


def test_its_entry_and_its_lock_go_with_it() -> None:
    """It has no process that anything would have to be waited for."""
    life = Life(fleet("ready", gpus=2))
    scale(life, +1)
    scale(life, -1)
    assert life.events() == ["DrainRequested", "SpawnFailed"]
    assert [each.uuids for each in life.did(ins.Unlock)] == [(life.device(1).uuid,)]
    assert [each.names for each in life.did(ins.Commit)] == [(name(1),)]


def test_one_whose_process_is_being_made_is_waited_for() -> None:
    life = Life(fleet("ready", gpus=2))
    scale(life, +1)
    life.begun(1)
    assert scale(life, -1) == []
    assert (life.state(1), life.free()) == ("draining", [])
    assert [each.split()[0] for each in life.made(1)] == ["SIGTERM"]


def test_the_template_stays() -> None:
    life = Life(fleet("pending", gpus=1))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.feed(st.Drain(stimulus_id="drain", name=name(), force=True))
    assert (life.state(), life.free()) == ("exited", [0])


@pytest.mark.parametrize("template", [DECODE, FRONTEND], ids=["on a GPU", "without"])
def test_one_that_is_to_be_restarted_is_ordered_anew(template: Template) -> None:
    """With the configuration of now; the order before is called off, so that there are not two."""
    entry = worker(0, "pending", template)
    life = Life(fleet(entry))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.feed(st.Restart(stimulus_id="restart", name=entry.name))
    did = [type(each).__name__ for each in life.last if isinstance(each, ins.CallOff | ins.Spawn | ins.LookAtGpus)]
    assert did == ["CallOff", "LookAtGpus" if template is DECODE else "Spawn"]
    if template is DECODE:
        assert life.gpus() == ["spawn VllmWorker"]


@pytest.mark.parametrize("now", [False, True])
def test_a_run_that_leaves_waits_for_no_process_that_nobody_has_begun(now: bool) -> None:
    """`dynamo down`, with and without `--now`."""
    life = Life(fleet("pending", gpus=1))
    life.feed(st.StartAll(stimulus_id="serve"))
    assert life.feed(st.Leave(stimulus_id="down", now=now)) == ["call off spawn VllmWorker"]
    assert life.state() == "exited"
