"""The machine: `dynamo apply`, another deployment in place of the one that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.fleet import Fleet, Template
from dynamo_local.core.fleet.step import step
from dynamo_local.core.types import Role
from dynamo_local.errors import NotApplicable, UnknownWorker
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, TEMPLATES, fleet, lease_of, name, on_ledger, worker
from tests.fakes.arbiter.machine import Life

OLD = replace(DECODE, fingerprint="old")
NEW = replace(DECODE, fingerprint="new")
SIDECAR = Template("Sidecar", Role.OTHER)


def served(*states: str, gpus: int = 8, more: tuple[Any, ...] = ()) -> Fleet:
    """Decode workers of the old configuration."""
    workers = [worker(n, state, OLD, launched="old") for n, state in enumerate(states)]
    return on_ledger([*workers, *more], gpus, (OLD, *TEMPLATES[1:]))


def order(*templates: Template, **more: Any) -> st.Apply:
    """`dynamo apply`"""
    return st.Apply(stimulus_id="apply:1", templates=templates or (NEW, *TEMPLATES[1:]), **more)


def refusal(view: Fleet, wanted: st.Apply) -> str:
    """Why it cannot be; nothing has changed."""
    with pytest.raises(NotApplicable) as refused:
        step(view, wanted, 100.0)
    return str(refused.value)


def renew(life: Life, n: int, pid: int) -> list[str]:
    """It leaves, comes back in a new process, and is ready; what follows is returned."""
    life.leaves(n)
    return life.up(n, pid)


def test_each_worker_of_another_configuration_gets_a_new_process() -> None:
    life = Life(served("ready", "ready"))
    assert life.feed(order()) == [f"revoke {lease_of(1)} VllmWorker_1"]
    assert life.did(ins.Commit)[0].head
    assert [life.fleet.outdated(life.worker(n)) for n in (0, 1)] == [True, True]
    assert renew(life, 1, 71) == [f"revoke {lease_of(0)} VllmWorker"]
    renew(life, 0, 72)
    assert [life.fleet.outdated(life.worker(n)) for n in (0, 1)] == [False, False]
    assert life.fleet.restarts == ()


def test_who_does_not_differ_is_left_alone() -> None:
    life = Life(served("ready", "ready", more=(worker(0, "ready", FRONTEND),)))
    later = replace(OLD, drain_deadline_s=5.0)
    assert life.feed(order(later, *TEMPLATES[1:])) == []
    assert (life.states(), life.fleet.restarts) == (["ready", "ready"], ())
    assert life.fleet.template("VllmWorker").drain_deadline_s == 5.0


def test_the_only_worker_is_replaced_by_one_of_the_new_configuration() -> None:
    life = Life(served("ready"))
    assert life.feed(order()) == ["spawn VllmWorker_1"]
    assert life.up(1, 71) == [f"revoke {lease_of(0)} VllmWorker"]
    assert not life.fleet.outdated(life.worker(1))


def test_numbers_of_workers_change_at_once() -> None:
    prefill = worker(0, "ready", TEMPLATES[1])
    life = Life(served("ready", "ready", gpus=3, more=(prefill,)))
    wanted = order(OLD, *TEMPLATES[1:], counts={"PrefillWorker": 2, "VllmWorker": 1})
    assert life.feed(wanted) == [f"revoke {lease_of(1)} VllmWorker_1"]
    assert str(life.fleet.workers["dynamo_PrefillWorker_1"].state) == "pending", "its GPU is on its way"


def test_what_is_removed_leaves_when_what_comes_is_ready() -> None:
    old = [worker(n, "ready", SIDECAR) for n in (0, 1)]
    life = Life(on_ledger([worker(0, "ready"), *old], 2, (DECODE, SIDECAR)))
    coming = Template("Other", Role.OTHER)
    assert life.feed(order(DECODE, coming, counts={"Other": 1})) == ["spawn Other"]
    other = "dynamo_Other"
    life.feed(st.ProcessMade(stimulus_id="spawn", name=other, pid=71, start_time=1.0, started_at=1.8e9))
    went = life.feed(st.KeyPut(stimulus_id="etcd", name=other, pid=71, lease="aa"))
    assert [each.split()[0] for each in went] == ["revoke", "revoke"]
    for each in old:
        assert each.pid is not None
        life.feed(st.ProcessGone(stimulus_id="exit", name=each.name, pid=each.pid, code=0))
        life.feed(st.Swept(stimulus_id="sweep", name=each.name))
    assert [template.component for template in life.fleet.templates] == ["VllmWorker", "Other"]
    assert "dynamo_Sidecar" not in life.fleet.workers


def test_a_component_that_is_removed_gets_no_more_workers() -> None:
    life = Life(on_ledger([worker(0, "ready"), worker(0, "ready", SIDECAR)], 2, (DECODE, SIDECAR)))
    life.feed(order(DECODE, force=True))
    assert str(life.fleet.workers["dynamo_Sidecar"].state) == "draining"
    with pytest.raises(UnknownWorker, match="Sidecar is being removed"):
        life.feed(st.ScaleAll(stimulus_id="planner:1", targets={"Sidecar": 1}))


def test_what_cannot_be_is_refused_with_all_reasons() -> None:
    view = served("ready", "ready", gpus=2, more=(worker(0, "ready", FRONTEND, launched="old"),))
    frontend = replace(FRONTEND, fingerprint="new")
    wide = replace(NEW, gpus_per_worker=2)
    why = refusal(view, order(wide, TEMPLATES[1], frontend, counts={"PrefillWorker": 1}))
    assert "PrefillWorker: too few GPUs" in why
    assert "dynamo_Frontend needs a new process and is the only worker of Frontend" in why
    assert f"{name(1)} needs 2 GPUs, 1 more than there will be" in why
    assert "VllmWorker: " in refusal(view, order(OLD, *TEMPLATES[1:], counts={"VllmWorker": 0}))
    life = Life(view)
    life.feed(st.Restart(stimulus_id="restart:1", name="VllmWorker"))
    assert "restart:1 is under way, and has not come to" in refusal(life.fleet, order())


def test_forced_the_only_worker_goes_first() -> None:
    frontend = worker(0, "ready", FRONTEND, launched="old")
    life = Life(served("ready", gpus=2, more=(frontend,)))
    wanted = order(NEW, TEMPLATES[1], replace(FRONTEND, fingerprint="new"), force=True)
    assert life.feed(wanted) == [f"SIGTERM {frontend.pid} Frontend"]
    assert life.fleet.restarts[0].in_place == {"dynamo_Frontend"}


def test_more_gpus_a_worker_are_taken_one_worker_after_the_other() -> None:
    life = Life(served("ready", "ready", gpus=4))
    life.feed(order(replace(NEW, gpus_per_worker=2), *TEMPLATES[1:]))
    renew(life, 1, 71)
    renew(life, 0, 72)
    assert [len(life.worker(n).gpus) for n in (0, 1)] == [2, 2]


def test_a_configuration_that_does_not_start_stops_at_the_first_worker() -> None:
    life = Life(served("ready", "ready"))
    life.feed(order())
    life.leaves(1)
    life.fails_to_start(1, until=lambda: life.state(1) == "faulted")
    life.gpus()
    assert (life.states(), life.fleet.restarts) == (["ready", "faulted"], ())
    assert life.feed(order(OLD, *TEMPLATES[1:], counts={"VllmWorker": 2}))[-1] == "spawn VllmWorker_1"
    life.up(1, 99)
    assert life.states() == ["ready", "ready"]
    assert life.worker().start.starts == 1


def test_workers_of_an_older_arbiter_are_not_called_outdated() -> None:
    life = Life(fleet("ready"))
    life.feed(order())
    assert not life.fleet.outdated(life.worker())
