"""Workers on standby: which may sleep or wake, and what follows until the worker says that it has done so.

The rules, in prose:

* Only workers whose component has `standby` in its configuration sleep. Their engines were made, and rehearsed, for it.
* Unforced, the last ready worker of a component is not put to sleep.
* A sleeper wakes on its own devices, because its process is pinned to them. If somebody holds one of these, the wake is
  refused and names the holder. If all holders leave, the sleeper waits until they are gone.
* A worker that is still to be put to sleep just stays awake.
* The controller repeats an order until the worker says in its ready key that it has carried the order out. A key
  about an earlier order is out of date.
* An exit, silence or a drain meanwhile is handled as for any worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet.builder import STARTED_AGAIN, StepBuilder
from dynamo_local.core.fleet.effects import Order, Tell
from dynamo_local.core.fleet.events import KeyPut, OrderAnswered, Sleep, Wake
from dynamo_local.core.fleet.fleet import Fleet, Intent, RestartPlan, Standby, StandbyFacts, Template, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import Sleeper, gib
from dynamo_local.core.notes import Ailing
from dynamo_local.core.types import Missing
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError, NotEnoughMemory, NotSleepable, NotWakeable

ENGINE_S = 120.0
"""How long an engine may take to let go of its GPU, when its worker's streams have ended."""
ASK_AGAIN_S = 2.0
"""An order of which nobody knows whether it arrived is given again after so long."""
KEEP = "standby"
"""The cause of what follows from `ServiceArgs.standby`."""


# --- decisions ---------------------------------------------------------------------------------

LEVELS = (1, 2)


def decide_sleep(view: Fleet, command: Sleep) -> tuple[Move, ...]:
    """None for a worker that sleeps, or will, at that level.

    Raises `UnknownWorker`, `NotSleepable` or `NotEnoughMemory`. The caller checks whether it is the last that serves
    (`scaling.check_not_last`).
    """
    return tuple(_to_sleep(view, view.worker(command.name), command.level))


def _to_sleep(view: Fleet, worker: Worker, level: int) -> Iterator[Move]:
    if level not in LEVELS:
        raise NotSleepable(f"there is no sleep level {level}; 1 keeps the weights in main memory, 2 reads them again")
    if worker.stands_by and not TRAITS[worker.state].standby:
        return  # it sleeps as soon as it has started
    if worker.stands_by:
        if worker.standby.level != level:
            raise NotSleepable(
                f"{worker.name} is {worker.state} at level {worker.standby.level} already; `dynamo wake {worker.name}` "
                "first"
            )
        return
    if worker.state is not S.READY and not TRAITS[worker.state].standby:
        raise NotSleepable(f"{worker.name} is {worker.state}: only a ready worker can be put to sleep")
    if view.template_of(worker).standby is None:
        raise NotSleepable(
            f"{worker.name} cannot sleep: its engine was not started for it; set `ServiceArgs.standby` of "
            f"{worker.component} (0 keeps none asleep) and apply that"
        )
    if worker.standby.cannot is not None:
        raise NotSleepable(f"{worker.name} cannot sleep: {worker.standby.cannot}")
    _check_host_memory(view, worker, level)
    yield Move(M.SLEEP, worker.name, "sleep", level=level)


def _check_host_memory(view: Fleet, worker: Worker, level: int) -> None:
    needed, free = worker.standby.host_bytes, view.host_free_bytes
    if level != 1 or isinstance(needed, Missing) or isinstance(free, Missing) or needed <= free:
        return
    raise NotEnoughMemory(
        f"{worker.name} cannot sleep at level 1: that takes {gib(needed)} of main memory for its weights, {gib(free)} "
        f"are free; `dynamo sleep {worker.name} --level 2` keeps none there, and reads the weights again when it wakes"
    )


def decide_wake(view: Fleet, command: Wake) -> tuple[Move, ...]:
    """None for a worker that serves or is being woken.

    Raises `UnknownWorker`, or `NotWakeable` that names the holder of the worker's devices.
    """
    worker = view.worker(command.name)
    if worker.ready or worker.state is S.WAKING or (TRAITS[worker.state].asleep and not worker.standby.wanted):
        return ()
    if not worker.stands_by:
        raise NotWakeable(f"{worker.name} is {worker.state}, and not asleep: there is nothing to wake")
    if TRAITS[worker.state].asleep and (why := waits_in_vain(view, worker)) is not None:
        raise NotWakeable(
            f"{worker.name} cannot be woken on its GPUs, to which its process is pinned: {why}; free them, or start "
            f"another worker elsewhere (`dynamo scale {worker.component} +1 --no-wake`)"
        )
    return (Move(M.WAKE, worker.name, "wake"),)


def waits_in_vain(view: Fleet, worker: Worker) -> str | None:
    """Why a sleeper that waits for its devices will not get them; None while it may."""
    why = view.gpus.why_not_woken(worker.name, view.template_of(worker).vram_share)
    return why if why is not None and not _holders_leave(view, worker) else None


def _holders_leave(view: Fleet, worker: Worker) -> bool:
    """Somebody of ours holds its devices, and all of those leave (or fall asleep)."""
    uuids = view.gpus.sleepers[worker.name].uuids
    holders = [view.workers[who] for uuid in uuids if (who := view.gpus.holder_of.get(uuid)) is not None]
    stay = (each.counts or (each.stands_by and each.state is not S.FALLING_ASLEEP) for each in holders)
    return bool(holders) and not any(stay)


def kept_asleep(view: Fleet, template: Template, going: Sequence[Worker], reason: str) -> dict[str, Move]:
    """Ready workers that sleep instead of being given up, by name: as many as the component lacks on standby.

    `_keep` would start others for that. A model that may have no worker keeps one asleep, where its engine can sleep.
    Not one that an earlier arbiter started: its process alone holds its GPUs' locks, so that nobody could use them.
    """
    there = sum(worker.stands_by for worker in view.of(template.component))
    wanted = max(template.standby or 0, int(template.may_be_none and template.standby is not None))
    moves: dict[str, Move] = {}
    for worker in going:
        if len(moves) + there >= wanted:
            break
        if template.may_be_none and any(uuid in view.gpus.elsewhere for uuid in worker.gpus):
            continue
        try:
            able = any(_to_sleep(view, worker, LEVELS[0]))
        except DynamoError:
            able = False
        if able:
            moves[worker.name] = Move(M.SLEEP, worker.name, reason, level=LEVELS[0])
    return moves


def wanted_gpus(view: Fleet, targets: Mapping[str, int]) -> frozenset[str]:
    """GPUs of the sleepers of those components that get more workers: a wake is quicker than a start elsewhere."""
    more = {component for component, count in targets.items() if count > view.capacity(component)}
    sleepers = view.gpus.sleepers.items()
    return frozenset(uuid for name, sleeper in sleepers if _sleeps_for(view, name, more) for uuid in sleeper.uuids)


def _sleeps_for(view: Fleet, name: str, components: Collection[str]) -> bool:
    worker = view.workers.get(name)
    return worker is not None and worker.stands_by and worker.component in components


def woken_first(view: Fleet, component: str, count: int, reason: str, *, waits: bool = False) -> tuple[Move, ...]:
    """At most so many workers on standby that can serve soon: the ones nearest to it first.

    `waits`: also those whose devices are held by workers that leave.
    """
    order = {S.FALLING_ASLEEP: 0, S.SLEEPING: 1, S.STARTING: 2}
    there = [worker for worker in view.of(component) if worker.stands_by]
    there.sort(key=lambda w: (order.get(w.state, 3), w.standby.level, w.n))
    moves: list[Move] = []
    ledger, share = view.gpus, view.template(component).vram_share
    for worker in there:
        if len(moves) == count:
            break
        if TRAITS[worker.state].asleep:
            if ledger.why_not_woken(worker.name, share) is None:
                ledger = ledger.wake(worker.name, share)
            elif not (waits and worker.standby.wanted and _holders_leave(view, worker)):
                continue
        moves.append(Move(M.WAKE, worker.name, f"{reason}: it was {worker.state}"))
    return tuple(moves)


# --- orders --------------------------------------------------------------------------------------


def put_to_sleep(builder: StepBuilder, worker: Worker, level: int, reason: str) -> None:
    """Order it to sleep; one that sleeps and waited to be woken just goes on."""
    standby = replace(worker.standby, wanted=True, drained=False)
    if TRAITS[worker.state].asleep:
        builder.change(worker.name, standby=standby, reason=reason)
        return
    level = worker.standby.level if worker.state is S.WAKING else level
    standby = replace(standby, order=standby.order + 1, level=level)
    details = {"level": level, "reason": reason}
    cause, due_s = builder.stimulus_id, builder.now_s + builder.template(worker.name).drain_deadline_s + ENGINE_S
    builder.apply(worker.name, K.SLEEP_REQUESTED, details, standby=standby, reason=reason, cause=cause, due_s=due_s)
    give(builder, worker.name)


def wake_up(builder: StepBuilder, worker: Worker, reason: str) -> None:
    """Order it to wake, if it can have its devices; else it waits for them. One that does not sleep yet, will not."""
    standby = replace(worker.standby, wanted=False)
    if not TRAITS[worker.state].standby:
        builder.change(worker.name, standby=standby, cause=builder.stimulus_id)
        return
    if not TRAITS[worker.state].asleep:
        _order_to_wake(builder, worker, standby, reason)
        return
    share = builder.template(worker.name).vram_share
    if builder.fleet.gpus.why_not_woken(worker.name, share) is not None:
        builder.change(worker.name, standby=standby, reason=reason, cause=builder.stimulus_id)
        builder.look_at_gpus(builder.now_s)
        return
    uuids = builder.fleet.gpus.sleepers[worker.name].uuids
    builder.set(gpus=builder.fleet.gpus.wake(worker.name, share))
    builder.change(worker.name, gpus=uuids)
    _order_to_wake(builder, worker, standby, reason)


def _order_to_wake(builder: StepBuilder, worker: Worker, standby: Standby, reason: str) -> None:
    due_s = builder.now_s + builder.template(worker.name).start_deadline_s
    standby = replace(standby, order=standby.order + 1)
    what: dict[str, Any] = {"standby": standby, "reason": reason, "cause": builder.stimulus_id, "due_s": due_s}
    builder.apply(worker.name, K.WAKE_REQUESTED, {"reason": reason}, **what)
    give(builder, worker.name)


def give(builder: StepBuilder, name: str) -> None:
    """Give the worker its last order (again): it takes the same one twice."""
    worker = builder.worker(name)
    if worker.pid is None:
        return
    builder.change(name, standby=replace(worker.standby, ask_s=builder.now_s + ASK_AGAIN_S))
    level = None if worker.state is S.WAKING else worker.standby.level
    builder.do(Order(name, worker.pid, worker.standby.order, level))


def answered(builder: StepBuilder, seen: OrderAnswered) -> None:
    """It has the order; or it will not carry it out; or nobody knows, and it is asked again (`ask_s`)."""
    worker = builder.get(seen.name)
    if worker is None or worker.pid != seen.pid or worker.standby.order != seen.order or seen.error is not None:
        return
    if worker.state not in (S.FALLING_ASLEEP, S.WAKING):
        return
    builder.change(seen.name, standby=replace(worker.standby, ask_s=None))
    if seen.refused is not None and worker.state is S.FALLING_ASLEEP:
        _not_asleep(builder, worker, seen.refused)


# --- what it says ----------------------------------------------------------------------------------


def heard(builder: StepBuilder, worker: Worker, seen: KeyPut) -> bool:
    """It has put its key; whether that was about standby, so that nothing more follows from it."""
    facts = seen.standby
    if facts is None:
        return TRAITS[worker.state].standby
    worker = _noted(builder, worker, facts)
    state = worker.state
    if state is S.STARTING and facts.asleep:  # adopted: nobody saw that it was ready first
        builder.apply(worker.name, K.REGISTERED, {"lease": seen.lease}, due_s=None)
        state = S.READY
    known = TRAITS[state].standby or (state is S.READY and facts.asleep)
    if not known or facts.order < worker.standby.order:
        return TRAITS[state].standby
    if facts.asleep and state in (S.READY, S.FALLING_ASLEEP):
        _slept(builder, builder.worker(worker.name), facts, seen.stimulus_id)
    elif not facts.asleep and state is S.WAKING:
        _woken(builder, worker, facts, seen.stimulus_id)
    elif not facts.asleep and state is S.FALLING_ASLEEP:
        _not_asleep(builder, worker, facts.note or "it did not say why")
    return True


def _noted(builder: StepBuilder, worker: Worker, facts: StandbyFacts) -> Worker:
    """Note the facts that hold in any state."""
    standby = replace(worker.standby, cannot=facts.cannot, host_bytes=facts.rehearsed_bytes)
    if standby != worker.standby:
        builder.change(worker.name, standby=standby)
    return builder.worker(worker.name)


def _slept(builder: StepBuilder, worker: Worker, facts: StandbyFacts, cause: str) -> None:
    sleeper = Sleeper(worker.gpus, facts.vram_bytes, facts.host_bytes, facts.pids)
    builder.set(gpus=builder.fleet.gpus.fall_asleep(worker.name, sleeper))
    standby = replace(worker.standby, wanted=True, order=facts.order, level=facts.level, ask_s=None)
    builder.apply(worker.name, K.SLEPT, {"level": facts.level}, by=cause, gpus=(), due_s=None, standby=standby)
    builder.look_at_gpus(builder.now_s)  # somebody may wait for its devices
    if facts.recycle is not None:
        builder.do(Tell(f"{worker.name} is started again: {facts.recycle}"))
        _recycle(builder, worker, facts.recycle)


def _woken(builder: StepBuilder, worker: Worker, facts: StandbyFacts, cause: str) -> None:
    standby = replace(worker.standby, ask_s=None)
    builder.apply(worker.name, K.WOKEN, by=cause, due_s=None, reason=None, standby=standby)
    if facts.recycle is not None:
        builder.do(Tell(f"{worker.name} is restarted: {facts.recycle}"))
        _recycle(builder, worker, facts.recycle)


def _recycle(builder: StepBuilder, worker: Worker, why: str) -> None:
    """A new process, without a moment in which nobody serves: as `dynamo restart` would do it."""
    if any(name == worker.name for plan in builder.fleet.restarts for name, _ in plan.todo):
        return
    builder.change(worker.name, reason=why)
    plan = RestartPlan(f"recycle:{worker.name}", ((worker.name, worker.start.starts),))
    builder.set(restarts=(*builder.fleet.restarts, plan))


def _not_asleep(builder: StepBuilder, worker: Worker, why: str) -> None:
    """It serves as before; one that was started only to sleep leaves (`advance`)."""
    standby = replace(worker.standby, wanted=False, ask_s=None)
    what: dict[str, Any] = {"due_s": None, "reason": f"it was not put to sleep: {why}", "standby": standby}
    builder.apply(worker.name, K.SLEEP_CANCELLED, {"reason": why}, **what)
    builder.do(Tell(f"{worker.name} was not put to sleep: {why}", Ailing(worker.name)))


# --- deadlines, ends, successors --------------------------------------------------------------------


def still_awake(builder: StepBuilder, worker: Worker) -> None:
    """Its streams have not ended, or its engine hangs: it is woken, which does no harm to the first."""
    waited_s = builder.now_s - worker.since_s
    why = f"it was not asleep {waited_s:.0f} s after it was asked to"
    builder.do(Tell(f"{worker.name}: {why}; it serves again", Ailing(worker.name)))
    wake_up(builder, worker, why)


def still_asleep(builder: StepBuilder, worker: Worker) -> None:
    """It does not wake: it is ended, and started again."""
    waited_s = builder.now_s - worker.since_s
    reason = f"was not awake {waited_s:.0f} s after it was asked to wake"
    builder.apply(worker.name, K.HEALTH_FAILED, {"reason": reason}, by="wake-deadline", reason=reason)
    leaving.finish(builder, worker)


def ask_again(builder: StepBuilder, worker: Worker) -> None:
    """Nobody knows whether the order arrived."""
    if worker.state in (S.FALLING_ASLEEP, S.WAKING):
        give(builder, worker.name)
    else:
        builder.change(worker.name, standby=replace(worker.standby, ask_s=None))


def at_exit(builder: StepBuilder, worker: Worker, code: int | None) -> Worker:
    """One that ended in order after its lease had gone was told to leave by that, though nobody heard of it then."""
    if TRAITS[worker.state].standby and worker.leave.lease_gone and code == 0:
        reason, intent = "its lease was revoked or has expired", worker.intent
        if builder.fleet.restart_revoked and builder.fleet.leaving is None:
            reason, intent = reason + STARTED_AGAIN, Intent.RESTARTING
        builder.apply(worker.name, K.LEASE_REVOKED, {"lease": ""}, reason=reason, intent=intent)
        return builder.worker(worker.name)
    return worker


def resume(builder: StepBuilder, worker: Worker) -> None:
    """A successor: the orders under way are given again, and have their whole time."""
    template = builder.template(worker.name)
    if worker.state is S.FALLING_ASLEEP:
        builder.change(worker.name, due_s=builder.now_s + template.drain_deadline_s + ENGINE_S)
        give(builder, worker.name)
    elif worker.state is S.WAKING:
        builder.change(worker.name, due_s=builder.now_s + template.start_deadline_s)
        give(builder, worker.name)


# --- what is kept ------------------------------------------------------------------------------------


def advance(builder: StepBuilder) -> None:
    """Put workers to sleep that are to and can, wake those that wait for their devices, keep `standby` workers."""
    for worker in builder.workers():
        if worker.state is S.READY and worker.standby.wanted and worker.intent is Intent.STEADY:
            _first_sleep(builder, worker)
        elif TRAITS[worker.state].asleep and not worker.standby.wanted and worker.intent is Intent.STEADY:
            _try_to_wake(builder, worker)
    for template in builder.fleet.templates:
        if template.standby and not template.retired:
            _keep(builder, template)


def _first_sleep(builder: StepBuilder, worker: Worker) -> None:
    """It has started to sleep, or has been started again while it slept. One that cannot leaves."""
    cause, builder.stimulus_id = builder.stimulus_id, KEEP
    cannot = worker.standby.cannot
    if cannot is None:
        put_to_sleep(builder, worker, worker.standby.level, "standby")
    else:
        builder.change(worker.name, standby=replace(worker.standby, wanted=False))
        builder.set(no_standby={**builder.fleet.no_standby, worker.component: cannot})
        text = f"{worker.component}: no worker can be kept on standby: {cannot}"
        builder.do(Tell(f"{text}; {worker.name} leaves"))
        why = f"it cannot sleep: {cannot}"
        builder.apply(worker.name, K.DRAIN_REQUESTED, {"reason": why}, by=KEEP, reason=why)
        leaving.ask(builder, worker.name)
    builder.stimulus_id = cause


def _try_to_wake(builder: StepBuilder, worker: Worker) -> None:
    in_vain = waits_in_vain(builder.fleet, worker)
    if in_vain is not None:
        builder.change(worker.name, standby=replace(worker.standby, wanted=True))
        builder.do(Tell(f"{worker.name} is not woken: {in_vain}", Ailing(worker.name)))
    elif builder.fleet.gpus.why_not_woken(worker.name, builder.template(worker.name).vram_share) is None:
        cause, builder.stimulus_id = builder.stimulus_id, worker.cause or builder.stimulus_id
        wake_up(builder, worker, worker.reason or "wake")
        builder.stimulus_id = cause


def _keep(builder: StepBuilder, template: Template) -> None:
    """Start as many as are missing, on devices that nobody else is promised."""
    component, fleet = template.component, builder.fleet
    if component in fleet.no_standby or not any(worker.start.starts for worker in fleet.of(component)):
        return
    there = [w for w in fleet.of(component) if w.stands_by or (w.standby.wanted and w.state is S.FAULTED)]
    reserved, every = fleet.reserved(), fleet.names_from_lowest(component)
    names = ((name, n) for name, n, entry in every if entry is None and name not in reserved)
    for _ in range((template.standby or 0) - len(there)):
        fleet = builder.fleet
        free = len(fleet.gpus.free_for(template.vram_share)) - sum(fleet.promised().values())
        if free < template.gpus_per_worker:
            return
        name, n = next(names)
        builder.add(
            Worker(
                name,
                component,
                template.role,
                n,
                since_s=builder.now_s,
                cause=KEEP,
                standby=Standby(wanted=True),
            )
        )
        builder.look_at_gpus(builder.now_s)
