"""How workers leave: asked by the right signal, called back, ended at a deadline; one by one, or all in stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.core.fleet import events
from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.effects import CallOff, CountRequests, EndSession, Revoke, Signal, Tell
from dynamo_local.core.fleet.events import CalledBack, RequestsCounted, RevokeFailed
from dynamo_local.core.fleet.fleet import Fleet, Intent, Leave, Leaving, Worker
from dynamo_local.core.fleet.lifecycle import NEXT
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.states import ROLES, STAGES, TRAITS, LeaveBy
from dynamo_local.core.notes import Ailing
from dynamo_local.core.types import Load, Missing, Role
from dynamo_local.core.types import WorkerState as S

# --- drains
# How a worker leaves in order: the signal, the work that is left, the deadline, and when it may exit.

TAKE_BACK_DEADLINE_S = 10.0
"""For a worker that never was ready: it has nothing to finish, and may be deep in loading a model."""

ROUTED_LATE_S = 0.25
"""How long after it deregistered a request may still be on its way to a worker.

Watchers of etcd see a revoke within 3-4 ms (p99, measured), and the product promises none after 50 ms. The rest is for
a busy host."""


def how(role: Role, *, registered: bool = True, etcd_ok: bool = True) -> LeaveBy:
    """The signal of its role (`states.ROLES`). SIGTERM if there is no lease to revoke: it has not registered (yet), or
    etcd cannot be reached.
    """
    return ROLES[role].leave_by if registered and etcd_ok else LeaveBy.SIGTERM


def leave_deadline_s(drain_deadline_s: float, *, served: bool) -> float:
    """How long it may take. A worker that never was ready gets less; if it turns out to have registered in that
    moment (it may hold requests), the whole deadline again.
    """
    return drain_deadline_s if served else min(drain_deadline_s, TAKE_BACK_DEADLINE_S)


# --- what is left ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Left:
    """The work that a worker has left. `tokens` is of running requests only, an upper bound (they may stop earlier)."""

    running: int
    waiting: int
    tokens: int
    eta_s: float | Missing
    at_most_s: float | Missing

    def __str__(self) -> str:
        if not self.running and not self.waiting:
            return "nothing left"
        what = f"{self.running} in flight" + (f", {self.waiting} waiting" if self.waiting else "")
        if isinstance(self.eta_s, Missing):
            return f"{what}, no estimate ({self.eta_s.reason})"
        # Waiting requests are not in the estimate.
        return f"{what}, {'at least' if self.waiting else 'about'} {self.eta_s:.1f} s"


def left(load: Load | Missing) -> Left | Missing:
    """The work that is left on a worker, for `dynamo status`."""
    if isinstance(load, Missing):
        return load
    most_s = _seconds(load, load.remaining_tokens)
    # An engine is through with an answer before its client has read it.
    running = max(load.request_active_slots, load.unread)
    return Left(running, load.num_requests_waiting, load.remaining_tokens, eta_s(load), most_s)


def eta_s(load: Load | Missing) -> float | Missing:
    """When it is likely done: remaining tokens × live ITL, the tokens of running requests decoding side by side:
    `remaining_tokens / request_active_slots × itl_ms / 1000`.

    Exact if all running requests end together. The last one may take longer than this mean: at most
    `remaining_tokens × itl_ms / 1000` (`Left.at_most_s`, one request has all of them), and less if they stop before
    their limit. Requests that wait are not in it: their tokens are not published. Missing if the load is, if no
    token was generated yet (no ITL), if requests wait and none runs, or while clients do not read.
    """
    if isinstance(load, Missing):
        return load
    if load.unread:
        return Missing(f"no client reads {load.unread} of the answers")
    if load.num_requests_waiting and not load.request_active_slots:
        return Missing(f"{load.num_requests_waiting} requests wait and none runs")
    return _seconds(load, load.remaining_tokens / max(1, load.request_active_slots))


def _seconds(load: Load, tokens: float) -> float | Missing:
    if not tokens:
        return 0.0
    return Missing("no inter-token latency yet") if load.itl_ms is None else tokens * load.itl_ms / 1000


# --- deadlines ---------------------------------------------------------------------------------


def cut_streams(load: Load | Missing) -> int | Missing:
    """How many requests ending the session now cuts: running and waiting ones. Unknown is not 0."""
    return load if isinstance(load, Missing) else load.request_active_slots + load.num_requests_waiting


def exit_in_s(
    *,
    now_s: float,
    deregistered_s: float,
    last_arrival_s: float | None,
    in_flight: int,
    quiet_s: float = ROUTED_LATE_S,
) -> float | None:
    """When a draining worker may exit: 0.0 now, more: ask again then, None: not before what is in flight has ended.

    It stays for a quiet period after it deregistered and after the last request that came: whoever picked it in that
    moment is still served. A drain deadline below the quiet period wins; that is the caller's.
    """
    if in_flight:
        return None
    since_s = deregistered_s if last_arrival_s is None else max(deregistered_s, last_arrival_s)
    return max(0.0, since_s + quiet_s - now_s)


NAMED_REQUESTS = 20
HEALTH = "health"
"""The cause of what a worker's silence brings about."""
KILLED_GONE_S = 10.0
"""A SIGKILLed process is gone in milliseconds, or hangs in the kernel (a stuck driver): then we say so and go on."""


# --- one worker ------------------------------------------------------------------------------------


def ask(builder: StepBuilder, name: str) -> None:
    """Out of routing, by the signal that fits its role; from now on its drain deadline runs.

    One that has no process yet is asked when it has; where that was not even begun it has exited.
    """
    worker = builder.worker(name)
    if _called_off(builder, worker):
        return
    if worker.pid is None or worker.state is not S.DRAINING or worker.intent is Intent.RETURNING:
        return
    requested_at_s = builder.now_s if worker.leave.requested_at_s is None else worker.leave.requested_at_s
    builder.change(name, requested_at_s=requested_at_s, signalled=True, silent_at_expiry=False)
    builder.change(name, due_s=_deadline_s(builder, builder.worker(name)), counting=False)
    sign = how(worker.role, registered=worker.lease is not None)
    if sign is LeaveBy.REVOKE_LEASE and worker.lease is not None and builder.fleet.leaving is None:
        builder.do(Revoke(name, worker.lease, tells=True))
    else:
        builder.do(Signal(name, worker.pid))


def _called_off(builder: StepBuilder, worker: Worker) -> bool:
    """One whose process nobody has begun to make is gone at once."""
    if worker.state is not S.DRAINING or not worker.start.spawning or worker.start.spawn_begun:
        return False
    builder.apply(worker.name, K.SPAWN_FAILED, {"reason": "it was called off before it began"}, spawning=False)
    builder.do(CallOff(worker.name))
    return True


def _deadline_s(builder: StepBuilder, worker: Worker) -> float | None:
    if worker.leave.requested_at_s is None:
        return None
    deadline_s = builder.template(worker.name).drain_deadline_s
    return worker.leave.requested_at_s + leave_deadline_s(deadline_s, served=worker.health.served)


def revoke_failed(builder: StepBuilder, seen: RevokeFailed) -> None:
    """etcd cannot be reached: SIGTERM says the same. Not to one that is being called back: it would leave after all."""
    worker = builder.get(seen.name)
    if worker is None or worker.pid is None or worker.state is not S.DRAINING or worker.lease != seen.lease:
        return
    if worker.intent is Intent.RETURNING:
        builder.change(worker.name, signalled=False)
    else:
        builder.do(Signal(worker.name, worker.pid))


def called_back(builder: StepBuilder, seen: CalledBack) -> None:
    """A drain was taken back, or it was too late for that."""
    worker = builder.get(seen.name)
    if worker is None:
        return
    if worker.pid == seen.pid:
        builder.change(worker.name, calls=max(0, worker.leave.calls - 1))
        worker = builder.worker(seen.name)
    if seen.error is not None:
        _not_called_back(builder, worker, seen)
        return
    if worker.pid != seen.pid or worker.intent is not Intent.RETURNING or worker.leave.calls:
        return  # ordered to leave again meanwhile, and perhaps called back again: the later order is carried out next
    if worker.state is S.DRAINING:  # its registration may have been seen before its answer
        builder.apply(worker.name, K.DRAIN_CANCELLED, **stays(worker))
    else:
        builder.change(worker.name, **stays(worker))


def stays(worker: Worker) -> dict[str, Any]:
    """The fields of a worker whose drain is over, and that stays. Answers to calls back may still be under way."""
    return {"leave": Leave(calls=worker.leave.calls), "intent": Intent.STEADY, "reason": None, "due_s": None}


def _not_called_back(builder: StepBuilder, worker: Worker, seen: CalledBack) -> None:
    if worker.pid == seen.pid and worker.state is S.DRAINING and not worker.leave.signalled:
        # Nobody could tell it to leave either, and it would serve until its deadline cuts it.
        builder.change(worker.name, signalled=True)
        builder.do(Signal(worker.name, seen.pid))
    if seen.requested_by is not None:
        if worker.intent is Intent.RETURNING and worker.cause == seen.requested_by:  # else another call is under way
            builder.change(worker.name, intent=Intent.STEADY)
        return
    if worker.state is S.DRAINING and worker.leave.requested_at_s is None:
        # It had come back meanwhile, and an earlier signal to leave met it only then: it is still wanted.
        builder.change(worker.name, intent=Intent.RETURNING)
    builder.do(
        Tell(
            f"the drain of {worker.name} came to its end before it was taken back ({seen.error}); it starts anew",
            Ailing(worker.name),
        )
    )


def drain_deadline(builder: StepBuilder, worker: Worker) -> None:
    """Ask for the requests that it still holds, so that they can be named. Their answer ends its session."""
    later_s = _deadline_s(builder, worker)
    if later_s is not None and later_s > builder.now_s:
        # It registered in the moment that it was asked: it may hold requests.
        builder.change(worker.name, due_s=later_s)
    elif builder.fleet.leaving is not None:
        end(builder, worker, _overdue(builder, worker), cut_streams(worker.load))
    elif worker.pid is not None:
        builder.change(worker.name, due_s=None, counting=True)
        builder.do(CountRequests(worker.name, worker.pid))


def requests_counted(builder: StepBuilder, seen: RequestsCounted) -> None:
    """End the session of a worker past its drain deadline; the requests that this cuts are counted and named."""
    worker = builder.get(seen.name)
    if worker is None or worker.pid != seen.pid or worker.state is not S.DRAINING or not worker.leave.counting:
        return  # it left, or its drain was taken back, while we asked
    cut = cut_streams(worker.load) if isinstance(seen.in_flight, Missing) else seen.in_flight
    end(builder, worker, _overdue(builder, worker), cut, seen.requests)


def _overdue(builder: StepBuilder, worker: Worker) -> str:
    return f"was not gone {_waited_s(builder, worker):.0f} s after it was asked to leave"


def _waited_s(builder: StepBuilder, worker: Worker) -> float:
    return 0.0 if worker.leave.requested_at_s is None else builder.now_s - worker.leave.requested_at_s


def end(builder: StepBuilder, worker: Worker, why: str, cut: int | Missing, requests: tuple[str, ...] = ()) -> None:
    """End the session of a draining worker. `requests` are the ids of what that cuts, as far as they are known."""
    count = f"{cut} requests were cut" if isinstance(cut, int) else f"what that cut is unknown ({cut.reason})"
    reason = f"{why}; {count}"
    waited_s = _waited_s(builder, worker)
    details = {"deadline_s": waited_s, "requests_cut": cut}
    builder.apply(worker.name, K.DRAIN_DEADLINE_PASSED, details, reason=reason, counting=False)
    more = f" and {cut - NAMED_REQUESTS} more" if isinstance(cut, int) and cut > NAMED_REQUESTS else ""
    named = f": {', '.join(requests[:NAMED_REQUESTS])}{more}" if requests else ""
    builder.do(Tell(f"{worker.name} {reason}{named}"))
    finish(builder, worker)


def hung(builder: StepBuilder, worker: Worker, reason: str) -> None:
    """One that answers nothing serves nothing, and finishes nothing: it is ended now."""
    if worker.state is S.DRAINING and worker.leave.requested_at_s is not None:
        heard, builder.stimulus_id = builder.stimulus_id, HEALTH
        end(builder, worker, reason, cut_streams(worker.load))
        builder.stimulus_id = heard
        return
    if (worker.state, K.HEALTH_FAILED) not in NEXT:
        return  # a start has its own deadline
    builder.apply(worker.name, K.HEALTH_FAILED, {"reason": reason}, by=HEALTH, reason=reason)
    if worker.lease is not None:
        builder.do(Revoke(worker.name, worker.lease))
    finish(builder, worker)
    if worker.intent is Intent.RETURNING:  # its lease had gone by itself; there is nothing left to call back
        builder.change(worker.name, intent=Intent.STEADY)


def finish(builder: StepBuilder, worker: Worker) -> None:
    """End the session of a worker whose end is decided; SIGKILL has until its deadline."""
    builder.change(worker.name, due_s=builder.now_s + KILLED_GONE_S)
    if worker.pid is not None:
        builder.do(EndSession(worker.name, worker.pid))


def still_there(builder: StepBuilder, worker: Worker) -> None:
    """SIGKILL did not end it."""
    builder.change(worker.name, due_s=None)
    builder.do(
        Tell(
            f"{worker.name}: pid {worker.pid} is still there {KILLED_GONE_S:g} s after SIGKILL (a stuck driver?)",
            Ailing(worker.name),
        )
    )


# --- the whole run -----------------------------------------------------------------------------------


def leave(builder: StepBuilder, order: events.Leave) -> None:
    """Begin to leave, or (`now`) wait for nothing any more."""
    begun = builder.fleet.leaving
    if begun is None:
        builder.set(leaving=Leaving(-1, order.now), restarts=(), look_s=None)
        _next_stage(builder)
    elif order.now and not begun.now:
        builder.set(leaving=replace(begun, now=True))
        for worker in _of_stage(builder):
            end_now(builder, worker)
    go_on(builder)


def go_on(builder: StepBuilder) -> None:
    """The next stage, once nothing of this one runs or can be waited for."""
    while builder.fleet.leaving is not None and builder.fleet.leaving.stage < len(STAGES):
        for worker in _of_stage(builder):
            if _may_begin_to_drain(worker):  # its change of role was heard of after its new role's stage had begun
                _send_away(builder, worker)
        if any(_is_waited_for(worker) for worker in _of_stage(builder)):
            return
        _next_stage(builder)


def has_left(fleet: Fleet) -> bool:
    """No worker has a process that could still be waited for."""
    return fleet.leaving is not None and fleet.leaving.stage >= len(STAGES)


def _next_stage(builder: StepBuilder) -> None:
    leaving = builder.fleet.leaving
    if leaving is None:
        return
    builder.set(leaving=replace(leaving, stage=leaving.stage + 1))
    for worker in _of_stage(builder):
        _send_away(builder, worker)


def _send_away(builder: StepBuilder, worker: Worker) -> None:
    if builder.fleet.leaving is not None and builder.fleet.leaving.now:
        end_now(builder, worker)
        return
    if _may_begin_to_drain(worker):
        builder.apply(
            worker.name,
            K.DRAIN_REQUESTED,
            {"reason": "down"},
            intent=Intent.STEADY,
            requested_at_s=None,
            due_s=None,
            reason="down",
        )
    elif worker.state is S.DRAINING:
        builder.change(worker.name, intent=Intent.STEADY)
    ask(builder, worker.name)


def _may_begin_to_drain(worker: Worker) -> bool:
    """Not one that drains already, or whose end is decided."""
    return (worker.state, K.DRAIN_REQUESTED) in NEXT


def _of_stage(builder: StepBuilder) -> list[Worker]:
    leaving = builder.fleet.leaving
    if leaving is None or not 0 <= leaving.stage < len(STAGES):
        return []
    stage = STAGES[leaving.stage]
    return [worker for worker in builder.workers() if worker.role in stage and (worker.runs or worker.start.spawning)]


def _is_waited_for(worker: Worker) -> bool:
    """Not for one that SIGKILL did not end in time."""
    return worker.start.spawning or not TRAITS[worker.state].killed or worker.due_s is not None


def end_now(builder: StepBuilder, worker: Worker) -> None:
    """`down --now`: its session is ended at once, whatever it has left."""
    if _may_begin_to_drain(worker):
        builder.apply(
            worker.name,
            K.DRAIN_REQUESTED,
            {"reason": "down --now"},
            requested_at_s=builder.now_s,
            reason="down --now",
        )
        worker = builder.worker(worker.name)
    if worker.pid is None:
        _called_off(builder, worker)
        return  # else it is ended when it is there
    if worker.state is S.DRAINING:
        cut = cut_streams(worker.load)
        details = {"deadline_s": 0.0, "requests_cut": cut}
        builder.apply(worker.name, K.DRAIN_DEADLINE_PASSED, details, due_s=builder.now_s + KILLED_GONE_S)
    builder.do(EndSession(worker.name, worker.pid))
