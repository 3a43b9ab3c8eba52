"""The life of all workers, decided in one pure place: `step(fleet, stimulus, now_s) -> (fleet, instructions)`.

A stimulus (`stimuli`) is a command, an observation, or time. The rules of one worker's states are the table of
`lifecycle`; what follows a transition is in `starting`, `leaving`, `observing` and `deciding`. An instruction
(`instructions`) is an effect; what comes of it comes back as a stimulus. Nothing here waits, looks or remembers:
the same fleet, stimulus and time always give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamo_local.core.fleet import applying, flipping, sleeping, starting
from dynamo_local.core.fleet import commands as deciding
from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet import observed as observing
from dynamo_local.core.fleet.builder import Draft
from dynamo_local.core.fleet.effects import Instruction
from dynamo_local.core.fleet.events import Stimulus
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import WorkerState as S

Handler = Callable[[Draft, Any], None]

HANDLERS: Mapping[type[Stimulus], Handler] = {
    st.StartAll: lambda draft, order: starting.start_all(draft),
    st.Scale: deciding.scale,
    st.ScaleAll: deciding.scale_all,
    st.Drain: deciding.drain,
    st.CancelDrain: deciding.cancel_drain,
    st.Restart: deciding.restart,
    st.Sleep: deciding.sleep,
    st.Wake: deciding.wake,
    st.Apply: applying.apply,
    st.Flip: flipping.flip,
    st.ScaleFlip: flipping.flip,
    st.CancelFlip: flipping.flip,
    st.Leave: leaving.leave,
    st.Resume: deciding.resume,
    st.SpawnBegun: starting.spawn_begun,
    st.ProcessMade: starting.process_made,
    st.ProcessRefused: starting.process_refused,
    st.ProcessGone: starting.process_gone,
    st.Swept: lambda draft, seen: starting.swept(draft, seen.name),
    st.KeyPut: observing.key_put,
    st.KeyGone: observing.key_gone,
    st.KeyLookedUp: observing.key_looked_up,
    st.RegistryListed: observing.registry_listed,
    st.InfraSeen: observing.infra_seen,
    st.RevokeFailed: leaving.revoke_failed,
    st.LoadsHeard: observing.loads_heard,
    st.CalledBack: leaving.called_back,
    st.OrderAnswered: sleeping.answered,
    st.RequestsCounted: leaving.requests_counted,
    st.FlipAnswered: observing.flip_answered,
    st.GpusSeen: starting.gpus_seen,
    st.GpuReserved: starting.gpu_reserved,
    st.Tick: lambda draft, tick: _tick(draft),
    st.Stalled: observing.stalled,
}

AT_DEADLINE: Mapping[S, Callable[[Draft, Worker], None]] = {
    S.STARTING: starting.start_deadline,
    S.DRAINING: leaving.drain_deadline,
    S.DRAIN_TIMED_OUT: leaving.still_there,
    S.CRASHED: leaving.still_there,
    S.START_TIMED_OUT: leaving.still_there,
    S.BACKING_OFF: starting.backoff_over,
    S.FLIPPING: flipping.ask,
    S.FALLING_ASLEEP: sleeping.still_awake,
    S.WAKING: sleeping.still_asleep,
}
"""What the deadline of a state (`Worker.due_s`) is for."""


def step(fleet: Fleet, stimulus: Stimulus, now_s: float) -> tuple[Fleet, tuple[Instruction, ...]]:
    """The fleet after the stimulus, and what is to be done. `now_s` is of the arbiter's monotonic clock.

    A command that is refused raises its `DynamoError`; an event that is not possible raises `IllegalTransition`. Either
    way the fleet that was given is the fleet that is.
    """
    draft = Draft(fleet, now_s, stimulus.stimulus_id)
    HANDLERS[type(stimulus)](draft, stimulus)
    if draft.fleet.leaving is not None:
        leaving.go_on(draft)
    else:
        deciding.advance_restarts(draft)
        sleeping.advance(draft)
    if draft.fleet.look_s is not None and draft.fleet.look_s <= now_s:
        starting.look(draft)
    due_s = next_due_s(draft.fleet)
    return draft.result(type(stimulus).__name__, due_s if due_s != next_due_s(fleet) else None)


def next_due_s(fleet: Fleet) -> float | None:
    """When the next `Tick` is due; None while nothing is waited for but observations."""
    times = []
    for worker in fleet.workers.values():  # at every step, twice: one pass
        if worker.due_s is not None:
            times.append(worker.due_s)
        if worker.absent_s is not None:
            times.append(worker.absent_s + observing.ABSENT_FOR_S)
        if worker.standby.ask_s is not None:
            times.append(worker.standby.ask_s)
    if fleet.look_s is not None and not fleet.looking:
        times.append(fleet.look_s)
    return min(times, default=None)


def _tick(draft: Draft) -> None:
    now_s = draft.now_s
    for worker in draft.workers():
        if worker.due_s is not None and worker.due_s <= now_s:
            AT_DEADLINE[worker.state](draft, worker)
        elif worker.absent_s is not None and worker.absent_s + observing.ABSENT_FOR_S <= now_s:
            observing.absent(draft, worker)
        elif worker.standby.ask_s is not None and worker.standby.ask_s <= now_s:
            sleeping.ask_again(draft, worker)
