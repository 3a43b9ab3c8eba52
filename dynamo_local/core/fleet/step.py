"""The life of all workers, decided in one pure place: `step(fleet, event, now_s) -> (fleet, effects, answer)`.

An event (`events`) is a command, an observation, or time. The table of `lifecycle` says which transitions are legal.
Five more machines run beside it, as code: starts and ends of processes (`starting`), drains (`draining`), keys, answers
and outages (`observed`), standby (`sleeping`), flips (`flipping`). `commands` decides and carries out commands.

An effect (`effects`) is carried out by the controller, and its result comes back as an event. Nothing here waits, looks
or remembers: the same fleet, event and time always give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamo_local.core.fleet import applying, flipping, sleeping, starting
from dynamo_local.core.fleet import commands as deciding
from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet import observed as observing
from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.effects import Effect
from dynamo_local.core.fleet.events import Event
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.moves import Answer
from dynamo_local.core.types import WorkerState as S

Handler = Callable[[StepBuilder, Any], Answer | None]
"""Only a command is answered."""

NOTHING = Answer()

HANDLERS: Mapping[type[Event], Handler] = {
    st.StartAll: lambda builder, order: starting.start_all(builder),
    st.Scale: deciding.scale,
    st.ScaleAll: deciding.scale_all,
    st.Drain: deciding.drain,
    st.Restart: deciding.restart,
    st.Sleep: deciding.sleep,
    st.Wake: deciding.wake,
    st.Apply: applying.apply,
    st.Flip: flipping.flip,
    st.ScaleFlip: flipping.scale_flip,
    st.Leave: leaving.leave,
    st.Resume: deciding.resume,
    st.SpawnBegun: starting.spawn_begun,
    st.ProcessMade: starting.process_made,
    st.ProcessRefused: starting.process_refused,
    st.ProcessGone: starting.process_gone,
    st.Swept: lambda builder, seen: starting.swept(builder, seen.name),
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
    st.Tick: lambda builder, tick: _tick(builder),
    st.Stalled: observing.stalled,
}

AT_DEADLINE: Mapping[S, Callable[[StepBuilder, Worker], None]] = {
    S.PENDING: starting.its_turn,
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
"""The handler of each state's deadline (`Worker.due_s`)."""


def step(fleet: Fleet, event: Event, now_s: float) -> tuple[Fleet, tuple[Effect, ...], Answer]:
    """The fleet after the event, what is to be done, and the answer to a command.

    `now_s` is of the arbiter's monotonic clock.

    A command that is refused raises its `DynamoError`; an event that is not possible raises `IllegalTransition`. Either
    way the fleet that was given is the fleet that is.
    """
    builder = StepBuilder(fleet, now_s, event.stimulus_id)
    answer = HANDLERS[type(event)](builder, event) or NOTHING
    if builder.fleet.leaving is not None:
        leaving.go_on(builder)
    else:
        deciding.advance_restarts(builder)
        sleeping.advance(builder)
    if builder.fleet.look_s is not None and builder.fleet.look_s <= now_s:
        starting.look(builder)
    return *builder.result(event.kind), answer


def next_due_s(fleet: Fleet) -> float | None:
    """When the next `Tick` is due; None while nothing is waited for but observations."""
    times = []
    for worker in fleet.workers.values():  # at every step, twice: one pass
        if worker.due_s is not None:
            times.append(worker.due_s)
        if worker.registration.absent_s is not None:
            times.append(worker.registration.absent_s + observing.ABSENT_FOR_S)
        if worker.standby.ask_s is not None:
            times.append(worker.standby.ask_s)
    if fleet.look_s is not None and not fleet.looking:
        times.append(fleet.look_s)
    return min(times, default=None)


def _tick(builder: StepBuilder) -> None:
    now_s = builder.now_s
    for worker in builder.workers():
        if worker.due_s is not None and worker.due_s <= now_s:
            AT_DEADLINE[worker.state](builder, worker)
        elif (
            worker.registration.absent_s is not None and worker.registration.absent_s + observing.ABSENT_FOR_S <= now_s
        ):
            observing.absent(builder, worker)
        elif worker.standby.ask_s is not None and worker.standby.ask_s <= now_s:
            sleeping.ask_again(builder, worker)
