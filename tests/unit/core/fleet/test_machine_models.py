"""The machine: models that share the GPUs may have no worker, sleep, and wake where another leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.degraded import lacking
from dynamo_local.core.fleet.events import Apply, VictimPolicy
from dynamo_local.core.fleet.fleet import Fleet, Template
from dynamo_local.core.fleet.moves import MoveKind
from dynamo_local.core.fleet.step import step
from dynamo_local.core.types import Role
from dynamo_local.errors import LastReadyWorker
from tests.fakes.arbiter.fleet_views import load, name, on_ledger, worker
from tests.fakes.arbiter.machine import Life

A = Template("a", Role.DECODE, gpus_per_worker=1, shared_floor=0, standby=0, vram_share=0.5)
B = Template("b", Role.DECODE, gpus_per_worker=1, shared_floor=0, standby=0, vram_share=0.5)
KEPT = replace(A, shared_floor=1)


def fleet(a: list[str], b: list[str], gpus: int, templates: tuple[Template, ...] = (A, B)) -> Fleet:
    """Workers of both models by their states; those of `a` get the first GPUs."""
    workers = [worker(n, state, templates[0]) for n, state in enumerate(a)]
    return on_ledger([*workers, *(worker(n, state, templates[1]) for n, state in enumerate(b))], gpus, templates)


def to(**targets: int) -> st.ScaleAll:
    return st.ScaleAll(stimulus_id="models:1", targets=targets, reasons={"a": "b is worth more"})


def test_the_last_worker_of_a_model_sleeps_and_its_gpu_starts_anothers() -> None:
    life = Life(fleet(["ready"], [], gpus=1))
    life.feed(to(a=0, b=1))
    assert {each.name: str(each.state) for each in life.fleet.workers.values()} == {
        name(0, "a"): "falling_asleep",
        name(0, "b"): "pending",
    }
    assert life.fleet.workers[name(0, "a")].reason == "b is worth more"
    assert life.fleet.capacity("a") == 0
    assert life.fleet.capacity("b") == 1


def test_a_floor_of_one_is_kept() -> None:
    before = fleet(["ready"], [], gpus=1, templates=(KEPT, B))
    with pytest.raises(LastReadyWorker):
        step(before, to(a=0, b=1), 1.0)


def test_a_sleeper_waits_for_its_gpu_instead_of_a_start_elsewhere() -> None:
    """`b` sleeps on the GPU that a worker of `a` holds, and that one leaves by the same order."""
    view = fleet(["ready"], [], gpus=1)
    asleep = worker(0, "sleeping", B)
    sleepers = on_ledger([asleep], 1, (A, B)).gpus.sleepers
    view = replace(view.with_workers({**view.workers, asleep.name: asleep}), gpus=replace(view.gpus, sleepers=sleepers))
    after, _, answer = step(view, to(a=0, b=1), 1.0)
    assert [move.kind for move in answer.by_component["b"]] == [MoveKind.WAKE]
    assert after.workers[asleep.name].on_its_way


@pytest.mark.parametrize("holder", [0, 1])
def test_the_worker_on_a_sleepers_gpu_goes_first(holder: int) -> None:
    """Else `b` would start elsewhere, and its sleeper sleep on."""
    view = fleet(["ready", "ready"], [], gpus=2)
    asleep = worker(0, "sleeping", B)
    (sleeper,) = on_ledger([asleep], 1, (A, B)).gpus.sleepers.values()
    held = replace(sleeper, uuids=view.workers[name(holder, "a")].gpus)
    gpus = replace(view.gpus, sleepers={asleep.name: held})
    view = replace(view.with_workers({**view.workers, asleep.name: asleep}), gpus=gpus)
    _, _, answer = step(view, to(a=1, b=1), 1.0)
    assert [move.name for move in answer.by_component["a"]] == [name(holder, "a")]
    assert [(move.kind, move.name) for move in answer.by_component["b"]] == [(MoveKind.WAKE, asleep.name)]


def test_a_model_without_a_worker_lacks_nothing() -> None:
    assert lacking(fleet(["exited"], ["sleeping"], gpus=2)) == ()
    assert [each.component for each in lacking(fleet(["starting"], [], gpus=2))] == ["a"]


def test_a_worker_whose_gpus_only_its_own_process_has_locked_does_not_sleep() -> None:
    view = fleet(["ready"], [], gpus=1)
    (uuid,) = view.workers[name(0, "a")].gpus
    adopted = replace(view, gpus=view.gpus.reserved_elsewhere(uuid, "an earlier arbiter"))
    after, _, _ = step(adopted, to(a=0), 1.0)
    assert str(after.workers[name(0, "a")].state) == "draining"


OLD_FRONTEND, NEW_FRONTEND, REMOVED = name(0, "Frontend"), name(1, "Frontend"), name(0, "b")


def with_frontend(*b: str) -> Life:
    """Models `a` and `b` behind a Frontend, whose substitute is ready after `dynamo apply` has removed `b`."""
    front = Template("Frontend", Role.FRONTEND, fingerprint="old", drain_deadline_s=60.0)
    other = replace(B, role=Role.AGGREGATED)  # the fakes give two workers of one role the same pid
    models = [worker(0, "ready", A), *(worker(n, state, other) for n, state in enumerate(b))]
    life = Life(on_ledger([worker(0, "ready", front, launched="old"), *models], 4, (front, A, other)))
    life.feed(Apply(stimulus_id="apply:1", templates=(replace(front, fingerprint="new"), A)))
    made = st.ProcessMade(stimulus_id="spawn", name=NEW_FRONTEND, pid=71, start_time=1.0, started_at=1.8e9)
    assert states(life, NEW_FRONTEND, REMOVED) == ["starting", "ready"], "the new Frontend is not there yet"
    life.feed(made)
    life.feed(st.KeyPut(stimulus_id="etcd", name=NEW_FRONTEND, pid=71, lease="aa"))
    return life


def states(life: Life, *names: str) -> list[str]:
    return [str(life.fleet.workers[each].state) for each in names]


def frontend_gone(life: Life) -> None:
    """The process of the old Frontend has ended."""
    pid = life.fleet.workers[OLD_FRONTEND].pid
    assert pid is not None
    life.feed(st.ProcessGone(stimulus_id="exit", name=OLD_FRONTEND, pid=pid, code=0))


def test_a_removed_models_workers_leave_when_the_replaced_frontend_is_gone() -> None:
    life = with_frontend("ready", "ready")
    both = (REMOVED, name(1, "b"))
    assert states(life, OLD_FRONTEND, *both) == ["draining", "ready", "ready"]
    life.after(30.0)
    assert states(life, OLD_FRONTEND, *both) == ["draining", "ready", "ready"]
    frontend_gone(life)
    assert states(life, *both) == ["draining", "draining"]
    assert life.fleet.restarts == ()


def test_a_successor_of_the_arbiter_waits_for_the_replaced_frontend_too() -> None:
    """It knows of a removed component only what the statefile keeps of it."""
    life = with_frontend("ready")
    known = tuple(replace(each, shared_floor=None) if each.retired else each for each in life.fleet.templates)
    life.fleet = replace(life.fleet, templates=known)
    life.feed(st.Resume(stimulus_id="resume:1"))
    assert states(life, OLD_FRONTEND, REMOVED) == ["draining", "ready"]
    frontend_gone(life)
    assert states(life, REMOVED) == ["draining"]


def test_forced_a_removed_models_workers_leave_at_once() -> None:
    waits = worker(1, "pending", replace(B, role=Role.AGGREGATED))
    life = Life(on_ledger([worker(0, "ready", A), waits], 4, (A, replace(B, role=Role.AGGREGATED))))
    life.feed(Apply(stimulus_id="apply:1", templates=(A,), force=True))
    assert set(life.fleet.workers) == {name(0, "a")}
    assert life.fleet.restarts == ()


def test_a_removed_models_worker_that_starts_serves_the_replaced_frontend_first() -> None:
    life = with_frontend("ready", "starting")
    assert states(life, OLD_FRONTEND, name(1, "b")) == ["draining", "starting"]
    frontend_gone(life)
    assert states(life, name(1, "b")) == ["draining"]


def test_a_removed_models_workers_leave_when_the_replaced_frontend_is_past_its_deadline() -> None:
    life = with_frontend("ready")
    life.until_due()
    assert states(life, OLD_FRONTEND, REMOVED) == ["draining", "ready"], "its requests are being counted"
    pid = life.fleet.workers[OLD_FRONTEND].pid or 0
    life.feed(st.RequestsCounted(stimulus_id="control", name=OLD_FRONTEND, pid=pid, in_flight=1, requests=("r",)))
    assert states(life, OLD_FRONTEND, REMOVED) == ["drain_timed_out", "draining"]


def test_a_removed_models_workers_leave_although_the_replaced_frontend_was_called_back() -> None:
    """It serves on with its old configuration, and nothing would ever end the wait for it."""
    life = with_frontend("ready")
    life.feed(st.Drain(cancel=True, stimulus_id="cancel:1", name=OLD_FRONTEND))
    assert states(life, REMOVED) == ["ready"]
    pid = life.fleet.workers[OLD_FRONTEND].pid or 0
    life.feed(st.KeyPut(stimulus_id="etcd", name=OLD_FRONTEND, pid=pid, lease="bb"))
    assert states(life, OLD_FRONTEND, REMOVED) == ["ready", "draining"]


BIG = replace(A, component="big", gpus_per_worker=4)


def on_one_node(view: Fleet, names: list[str]) -> bool:
    """Whether their GPUs are those of one node of four, which NVLink joins."""
    return {gpu.index // 4 for each in names for gpu in view.gpus.held[each]} in ({0}, {1})


def drained(view: Fleet, command: st.ScaleAll) -> list[str]:
    """The workers that leave, or fall asleep, by that order."""
    after, _, _ = step(view, command, 1.0)
    return [each.name for each in after.workers.values() if not each.counts and view.workers.get(each.name)]


def test_a_worker_of_four_gpus_gets_those_that_are_joined_best() -> None:
    """Not those of the workers with the least to do, half of which are on the other node."""
    view = on_ledger([worker(n, "ready", A, load=load(100 if n % 2 else 0)) for n in range(8)], 8, (A, BIG))
    idle = [name(n, "a") for n in range(0, 8, 2)]
    assert not on_one_node(view, idle)
    gone = drained(view, replace(to(a=4, big=1), victim_policy=VictimPolicy.LEAST_LOADED))
    assert len(gone) == 4
    assert on_one_node(view, gone)


def test_a_model_that_keeps_its_worker_decides_which_node_is_freed() -> None:
    """The victim policy prefers workers on the second node, but `b` keeps its own there."""
    view = on_ledger([*(worker(n, "ready", A) for n in range(6)), worker(0, "ready", B)], 8, (A, B, BIG))
    gone = drained(view, to(a=2, big=1))
    assert {gpu.index for each in gone for gpu in view.gpus.held[each]} == {0, 1, 2, 3}
