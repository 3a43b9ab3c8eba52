"""Tests what holds for every fleet and every change."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.fleet import events as stimuli
from dynamo_local.core.fleet import step as machine
from dynamo_local.core.fleet.events import Change, VictimPolicy, parse_target
from dynamo_local.core.fleet.fleet import Fleet, Intent, Worker
from dynamo_local.core.fleet.invariants import validate
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.scaling import victims
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import BadTarget, FlipUnderWay, LastReadyWorker, NotEnoughGpus
from tests.fakes.arbiter.decided import cancelled, drained, scaled_to
from tests.fakes.arbiter.fleet_views import DECODE, NO_LOAD, PREFILL, load, lower_names, on_ledger, worker

COURSES = {
    S.DRAINING: [Intent.STEADY, Intent.RESTARTING, Intent.RETURNING],
    S.DRAIN_TIMED_OUT: [Intent.STEADY, Intent.RESTARTING, Intent.RETURNING],
    S.EXITED: [Intent.STEADY, Intent.RESTARTING, Intent.RETURNING],
    S.CRASHED: [Intent.STEADY, Intent.LEAVING],
    S.START_TIMED_OUT: [Intent.STEADY, Intent.LEAVING],
}
LOADS = st.one_of(
    st.just(NO_LOAD),
    st.builds(load, st.integers(0, 50), active=st.integers(0, 3), hits=st.sampled_from([0.0, 0.25, 0.5])),
)
CHANGES = st.one_of(
    st.integers(-6, 6).filter(bool).map(lambda n: Change(n, relative=True)),
    st.integers(0, 8).map(lambda n: Change(n, relative=False)),
)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    workers: list[Worker] = []
    for template, most in ((DECODE, 6), (PREFILL, 3)):
        for n in sorted(draw(st.sets(st.integers(0, most), max_size=most))):
            state = draw(st.sampled_from(list(S)))
            course = draw(st.sampled_from(COURSES.get(state, [Intent.STEADY])))
            more: dict[str, Any] = {"load": draw(LOADS), "since_s": float(draw(st.integers(0, 5)))}
            if state is S.DRAINING and course is not Intent.RETURNING:
                more["served"] = draw(st.booleans())
            workers.append(worker(n, f"{state}/{course}", template, **more))
    return on_ledger(workers, 10, (DECODE, PREFILL))


def stepped(view: Fleet, order: stimuli.Event) -> Fleet:
    """The fleet after a command; whatever the fleet was, it is one that can be."""
    then, _, _ = machine.step(view, order, 9.0)
    validate(then)
    return then


def scaled(view: Fleet, change: Change, options: dict[str, Any]) -> Fleet:
    return stepped(view, stimuli.Scale(stimulus_id="t", component="VllmWorker", target=change, **options))


OPTIONS = st.fixed_dictionaries(
    {
        "force": st.booleans(),
        "victim_policy": st.sampled_from(list(VictimPolicy)),
        "by_person": st.booleans(),
        "wait_for_gpus": st.booleans(),
    }
)


@given(view=fleets(), change=CHANGES, options=OPTIONS)
def test_a_decision_reaches_its_number_or_changes_nothing(view: Fleet, change: Change, options: dict[str, Any]) -> None:
    decision = scaled_to(view, "VllmWorker", change, **options)
    assert decision == scaled_to(view, "VllmWorker", change, **options) or decision.refused is not None
    if decision.refused is not None:
        assert decision.moves == ()
        return
    have = view.capacity("VllmWorker")
    then = scaled(view, change, options)
    assert then.capacity("VllmWorker") == have + change.delta(have)
    names = [move.name for move in decision.moves]
    assert len(names) == len(set(names))
    assert scaled_to(then, "VllmWorker", Change(have + change.delta(have), relative=False)).or_raise() == ()


@given(view=fleets(), change=CHANGES, options=OPTIONS)
def test_an_unforced_decision_keeps_who_serves(view: Fleet, change: Change, options: dict[str, Any]) -> None:
    """A ready worker if there is one, else one on its way; for both components."""
    options["force"] = False
    decision = scaled_to(view, "VllmWorker", change, **options)
    then = scaled(view, change, options) if decision.refused is None else view
    for component in ("VllmWorker", "PrefillWorker"):
        assert bool(then.ready(component)) == bool(view.ready(component))
        assert bool(then.capacity(component)) >= bool(view.capacity(component))


@given(view=fleets(), n=st.integers(0, 6), cancel=st.booleans())
def test_named_decisions_touch_that_worker_alone(view: Fleet, n: int, cancel: bool) -> None:
    chosen = next((w for w in view.workers.values() if w.n == n), None)
    if chosen is None:
        return
    decision = (cancelled if cancel else drained)(view, chosen.name)
    for move in decision.moves:
        other = view.worker(move.name)
        assert other.name == chosen.name or (cancel and move.kind is M.TAKE_BACK and other.state is S.PENDING)
    if not cancel and decision.refused is None:
        then = stepped(view, stimuli.Drain(stimulus_id="t", name=chosen.name))
        assert not any(w.counts for w in then.workers.values() if w.name == chosen.name)


@given(view=fleets(), count=st.integers(1, 6), options=OPTIONS)
def test_new_workers_get_the_lowest_names_and_devices_that_nobody_waits_for(
    view: Fleet, count: int, options: dict[str, Any]
) -> None:
    """Every lower name has an entry that is not to be started; what is kept for others is not given out."""
    decision = scaled_to(view, "VllmWorker", Change(count, relative=True), **options)
    starts = [each for each in decision.moves if each.kind is M.SPAWN]
    started = {each.name for each in starts}
    for start in starts:
        for name, entry in lower_names(view, "VllmWorker", start.name):
            assert name in started or (entry is not None and entry.state is not S.FAULTED)
    immediate = sum(not start.waits for start in starts)
    assert immediate <= max(0, len(view.gpus.free) - sum(view.promised().values()))
    if not options["wait_for_gpus"]:
        assert immediate == len(starts)
    if isinstance(decision.refused, NotEnoughGpus):
        assert count > len(view.gpus.free) - sum(view.promised().values())


@given(view=fleets(), count=st.integers(1, 6))
def test_drains_are_taken_back_before_anything_is_started(view: Fleet, count: int) -> None:
    decision = scaled_to(view, "VllmWorker", Change(count, relative=True))
    if decision.refused is not None:
        return
    back = [view.worker(each.name) for each in decision.moves if each.kind is M.CANCEL_DRAIN]
    could = [w for w in view.of("VllmWorker") if w.cancellable]
    assert len(back) == min(count, len(could))
    assert [w.since_s for w in back] == sorted((w.since_s for w in could), reverse=True)[: len(back)]


@given(view=fleets(), count=st.integers(1, 6), policy=st.sampled_from(list(VictimPolicy)))
def test_nothing_ready_goes_while_something_is_on_its_way(view: Fleet, count: int, policy: VictimPolicy) -> None:
    decision = scaled_to(view, "VllmWorker", Change(-count, relative=True), victim_policy=policy)
    if decision.refused is not None:
        assert isinstance(decision.refused, BadTarget | LastReadyWorker | FlipUnderWay)
        return
    went = {each.name for each in decision.moves}
    ready = [name for name in went if view.worker(name).ready]
    if ready:  # a worker that changes its role for this one comes all the same
        assert {w.name for w in view.on_their_way("VllmWorker") if w.flip is None} <= went
    expected = victims(view.ready("VllmWorker"), policy)[: len(ready)]
    assert {w.name for w in expected} == set(ready)


@given(workers=st.integers(2, 6), fewer=st.integers(1, 5), policy=st.sampled_from(list(VictimPolicy)))
def test_down_and_up_again_brings_the_same_workers_back(workers: int, fewer: int, policy: VictimPolicy) -> None:
    view = on_ledger([worker(n, "ready") for n in range(workers)], workers)
    if fewer >= workers:
        return
    down = scaled_to(view, "VllmWorker", Change(-fewer, relative=True), victim_policy=policy)
    assert all(each.kind is M.DRAIN for each in down.or_raise())
    lower = scaled(view, Change(-fewer, relative=True), {"victim_policy": policy})
    up = scaled_to(lower, "VllmWorker", Change(fewer, relative=True))
    assert {each.name for each in up.or_raise()} == {each.name for each in down.moves}
    assert all(each.kind is M.CANCEL_DRAIN for each in up.moves)


@given(text=st.text(alphabet="+-=0123456789 x.٣", max_size=6))
def test_a_target_is_read_or_refused_and_nothing_else(text: str) -> None:
    try:
        change = parse_target(text)
    except BadTarget:
        return
    assert abs(change.count) == int(text.strip().lstrip("+-="))
    assert change.relative == (text.strip()[0] in "+-")
