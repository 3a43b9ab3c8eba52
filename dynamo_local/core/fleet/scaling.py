"""`scale`, `drain` and `drain --cancel` as decisions: a view of the fleet in, effects or a typed refusal out.

The rules, in prose:

* A decision is whole: with any part refused nothing is instructed.
* Capacity on its way counts; leaving and faulted workers do not; `=n` is the change from that count.
* More: drains are taken back first. The drain that began last goes before the others: that worker has the most left to
  do, so it is the least likely to be gone already. Next, workers on standby are woken (unless `wake` is off). Then the
  lowest names without a process are started: the bare one first, unused, template or faulted.
* While a component's workers are restarted, nobody but a person takes one of them away.
* A faulted worker is started again by a person's `+1`. An automatic decision (`by_person=False`) is refused instead:
  a planner would restart a broken worker for ever.
* Fewer: what is on its way is taken back first (it serves nothing yet), then ready workers by the victim policy. With
  `sleep` those are put to sleep where the component keeps some on standby and has too few.
* Unforced, a component that has a ready worker keeps one, and one that has only workers on their way keeps one. A
  model whose floor is 0 may have none: requests for it are held.
* A worker is started on devices that are free and not kept for another worker on its way (one that backs off will
  need its devices again). With `wait_for_gpus`, devices of workers that leave count too: the new entry waits for them.
  A drain that is taken back takes that hope away, so entries that wait in vain then are taken back as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice

from dynamo_local.core.fleet import sleeping
from dynamo_local.core.fleet.events import Drain, Scale, VictimPolicy
from dynamo_local.core.fleet.fleet import Fleet, Intent, Template, Worker
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import GpuAsk, best_connected, shortage
from dynamo_local.core.types import Load, Missing, WorkerState
from dynamo_local.errors import (
    BadTarget,
    BeingRestarted,
    DrainNotCancellable,
    FlipUnderWay,
    LastReadyWorker,
    NotEnoughGpus,
    TooManyWorkers,
    UnknownWorker,
    WorkerFaulted,
)

# --- victims
# The victims of a scale-down. Values in, an order out; the same fleet always gives the same answer.


def victims(workers: Iterable[Worker], policy: VictimPolicy, frees: frozenset[str] = frozenset()) -> tuple[Worker, ...]:
    """Ready workers, the first to go first. Those on a GPU of `frees` go before the others. Ties go by the highest
    suffix.

    A worker whose load is missing goes after all whose load is known: nobody can say that it is idle.
    """

    def cost(worker: Worker) -> tuple[bool, bool, float, float, int]:
        return frees.isdisjoint(worker.gpus), *_COSTS[policy](worker.load), -worker.n

    return tuple(sorted(workers, key=cost))


def arrivals(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Workers on their way, the first to be taken back first: the furthest from serving, then the highest suffix."""
    return tuple(sorted(workers, key=lambda worker: (TRAITS[worker.state].take_back or 0, -worker.n)))


def gpus_to_free(view: Fleet, targets: Mapping[str, int], policy: VictimPolicy) -> frozenset[str]:
    """The GPUs that a change of all these numbers should free, where a new worker takes several.

    They are the best-connected ones of those that are free, will be, or that the components that shrink can give up.
    """
    surplus = {name: view.capacity(name) - count for name, count in targets.items()}
    sizes = {name: size for name in targets if (size := view.template(name).gpus_per_worker) > 1 and surplus[name] < 0}
    if not sizes:
        return frozenset()
    back = {name: _takes_back(view, name, max(0, surplus[name])) for name in targets}
    surplus = {name: count - len(back[name]) for name, count in surplus.items()}
    going = [
        *chain.from_iterable(back.values()),
        *(worker for worker in view.workers.values() if not (worker.counts or worker.stands_by)),
    ]
    open_to = [*view.gpus.free, *(gpu for worker in going for gpu in view.gpus.held.get(worker.name, ()))]
    ready = [w for name in targets if surplus[name] > 0 for w in victims(view.ready(name), policy)]
    giver = {gpu.uuid: worker for worker in ready for gpu in view.gpus.held.get(worker.name, ())}
    every = [*open_to, *(view.gpus.by_uuid[uuid] for uuid in giver)]
    chosen: set[str] = set()

    def can_leave(uuids: Iterable[str]) -> bool:
        """No component would lose more workers than it is to."""
        going = {giver[uuid].name: giver[uuid].component for uuid in chosen.union(uuids) if uuid in giver}
        return all(count <= surplus[component] for component, count in Counter(going.values()).items())

    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        for _ in range(_starts_of(view, name, -surplus[name])):
            left = [gpu for gpu in every if gpu.uuid not in chosen]
            chosen.update(best_connected(left, min(sizes[name], len(left)), can_leave))
    return frozenset(chosen)


def _starts_of(view: Fleet, component: str, missing: int) -> int:
    """How many of its missing workers are started: sleepers come first, and they have their GPUs."""
    return max(0, missing - sum(worker.stands_by for worker in view.of(component)))


def cache_at_stake(load: Load) -> float:
    """Blocks of prefix cache that are of use: `gpu_prefix_cache_hit_rate × kv_total_blocks`.

    An estimate from what workers publish: the share of prompt tokens found in the cache, times its size.
    `kv_active_blocks` would be wrong: those are the blocks that running requests hold. An idle worker with a warm cache
    has none, because unused cached blocks count as free, in vLLM and in our engine.
    """
    return load.gpu_prefix_cache_hit_rate * load.kv_total_blocks


Cost = tuple[bool, float, float]
"""`(its load is missing, what would be lost, and by that)`; the smallest goes first."""

_UNKNOWN: Cost = (True, 0.0, 0.0)


def _nothing(load: Load | Missing) -> Cost:
    return False, 0.0, 0.0


def _work_left(load: Load | Missing) -> Cost:
    if isinstance(load, Missing):
        return _UNKNOWN
    return False, load.remaining_tokens, load.request_active_slots + load.num_requests_waiting


def _cache_lost(load: Load | Missing) -> Cost:
    return _UNKNOWN if isinstance(load, Missing) else (False, cache_at_stake(load), load.kv_active_blocks)


_COSTS: dict[VictimPolicy, Callable[[Load | Missing], Cost]] = {
    VictimPolicy.HIGHEST_SUFFIX: _nothing,
    VictimPolicy.LEAST_LOADED: _work_left,
    VictimPolicy.COLDEST: _cache_lost,
}


def decide(view: Fleet, command: Scale) -> tuple[Move, ...]:
    """The moves that bring the component there.

    Raises `UnknownWorker` (no such component, or more of one that is being removed), `BadTarget` (fewer than none),
    `LastReadyWorker`, `TooManyWorkers`, `NotEnoughGpus`, `WorkerFaulted` or `BeingRestarted`.
    """
    template = view.template(command.component)
    delta = command.target.delta(view.capacity(command.component))
    reason = command.reason or f"scale {command.target}"
    if delta < 0:
        if not command.by_person:
            _check_not_restarted(view, command.component)
        return _fewer(view, template, -delta, command, reason)
    if delta > 0:
        if template.retired:
            raise UnknownWorker(f"{command.component} is being removed by an apply, and gets no more workers")
        return _more(view, template, delta, command, reason)
    return ()


def _check_not_restarted(view: Fleet, component: str) -> None:
    """A planner counts a worker and its substitute as two, and would take the one that has just been started."""
    for plan in view.restarts:
        for name, _ in plan.todo:
            worker = view.workers.get(name)
            if worker is not None and worker.component == component:
                raise BeingRestarted(
                    f"{plan.stimulus_id} is under way in {component}, and has still to come to {name}: no worker of it "
                    "is taken away unasked until that is done"
                )


def decide_drain(view: Fleet, command: Drain) -> tuple[Move, ...]:
    """None for a worker that leaves already. A worker that does not serve (yet) is taken back.

    Raises `UnknownWorker`, `LastReadyWorker` or `FlipUnderWay`.
    """
    worker = view.worker(command.name)
    if worker.state is WorkerState.FAULTED:
        return (Move(M.TAKE_BACK, worker.name, "drain of a faulted worker"),)
    if (
        worker.leave.silent_at_expiry and worker.state is WorkerState.DRAINING
    ):  # it might come back; from now on it may not
        return (Move(M.DRAIN, worker.name, "drain"),)
    if not (worker.counts or worker.stands_by):
        return ()
    if worker.flip is not None:
        raise flip_under_way(worker, f"`dynamo drain {worker.name}`")
    check_not_last(view, [worker] if worker.counts else [], command.force, f"`dynamo drain {worker.name}`")
    return (taken(worker, "drain"),)


def decide_cancel(view: Fleet, command: Drain) -> tuple[Move, ...]:
    """None for a worker that is ready or returning. The drain of a restart is called off, too.

    Raises `UnknownWorker`, or `DrainNotCancellable` with the reason.
    """
    worker = view.worker(command.name)
    if worker.ready or worker.intent is Intent.RETURNING:
        return ()
    restarts = worker.drains_from_service and worker.intent is Intent.RESTARTING
    if not worker.cancellable and not restarts:
        raise DrainNotCancellable(_why_not_cancellable(worker))
    return (Move(M.CANCEL_DRAIN, worker.name, "drain --cancel"), *_waiting_in_vain(view, [worker]))


def flip_under_way(worker: Worker, what: str) -> FlipUnderWay:
    """The refusal of what cannot be done to a worker that changes its role now."""
    to = "" if worker.flip is None else worker.flip.name
    return FlipUnderWay(
        f"{what} is refused: {worker.name} becomes {to} at this moment; try again when it has, or take that back first "
        f"(`dynamo flip --cancel {worker.name}`)"
    )


def one_more(view: Fleet, component: str, reason: str) -> Move:
    """One more worker of the component, on devices that are free or will be: whoever leaves gives some back.

    No drain is taken back for it. Raises `TooManyWorkers` or `NotEnoughGpus`.
    """
    template = view.template(component)
    _check_limit(template, view.capacity(component) + 1)
    return _starts(view, template, 1, (), True, reason)[0]


# --- more --------------------------------------------------------------------------------------


def _more(view: Fleet, template: Template, count: int, command: Scale, reason: str) -> tuple[Move, ...]:
    component = template.component
    _check_limit(template, view.capacity(component) + count)
    drains = sorted((w for w in view.of(component) if w.cancellable), key=lambda w: (-w.since_s, w.n))[:count]
    back = tuple(Move(M.CANCEL_DRAIN, worker.name, f"{reason}: its drain is taken back") for worker in drains)
    waits = command.wait_for_gpus and template.may_be_none
    woken = sleeping.woken_first(view, component, count - len(back), reason, waits=waits) if command.wake else ()
    missing = count - len(back) - len(woken)
    faulted = [worker for worker in view.of(component) if worker.state is WorkerState.FAULTED]
    if missing and faulted and not command.by_person:
        worker = faulted[0]
        raise WorkerFaulted(
            f"{worker.name} is faulted ({worker.reason or 'no reason recorded'}): no more {component} is started "
            f"unasked; see its log, then `dynamo restart {worker.name}` or `dynamo drain {worker.name}`"
        )
    starts = _starts(view, template, missing, drains, command.wait_for_gpus, reason)
    return (*back, *woken, *starts, *_waiting_in_vain(view, drains))


def check_limit(view: Fleet, component: str) -> None:
    """Raises `TooManyWorkers` where one more is one too many."""
    _check_limit(view.template(component), view.capacity(component) + 1)


def _check_limit(template: Template, wanted: int) -> None:
    if template.max_workers is not None and wanted > template.max_workers:
        raise TooManyWorkers(
            f"{template.component} would have {wanted} workers, but its class allows {template.max_workers}; nothing "
            "was changed"
        )


def _starts(
    view: Fleet,
    template: Template,
    count: int,
    returning: Sequence[Worker],
    wait_for_gpus: bool,
    reason: str,
) -> tuple[Move, ...]:
    """New processes under the lowest names that have none, each with its devices."""
    reserved, every = view.reserved(), view.names_from_lowest(template.component)
    names = (found for found in every if found[0] not in reserved and _startable(found[2]))
    chosen = list(islice(names, count))
    asks = [
        GpuAsk(name, template.component, max(0, template.gpus_per_worker - (len(entry.gpus) if entry else 0)))
        for name, _, entry in chosen
    ]
    promised = view.promised()
    free = len(view.gpus.free_for(template.vram_share)) - sum(promised.values())
    spoken_for = [*returning, *(entry for _, _, entry in chosen if entry is not None)]
    coming = view.gpus_coming_back() - sum(len(worker.gpus) for worker in spoken_for)
    still_held = sum(len(entry.gpus) for _, _, entry in chosen if entry is not None)
    awaited = max(0, min(still_held, -free - coming))  # others that wait are promised these
    needed = sum(ask.gpu for ask in asks) + awaited
    if needed > max(0, free + (coming if wait_for_gpus else 0)):
        hint = f"; {coming} of them come back when the workers that leave are gone" if coming > 0 else ""
        hint += f"; {awaited} that an earlier process still holds are kept for others that wait" if awaited else ""
        raise NotEnoughGpus(shortage(view.gpus, asks, promised) + hint)
    made: list[Move] = []
    used = 0
    for (name, n, entry), ask in zip(chosen, asks, strict=True):
        used += ask.gpu
        waits = bool(ask.gpu) and used > free
        why = reason if entry is None else f"{reason}: it was {entry.state}"
        made.append(Move(M.SPAWN, name, why, component=template.component, n=n, waits=waits))
    return tuple(made)


def _startable(entry: Worker | None) -> bool:
    """Unused, faulted, or the template. A suffixed entry that exited is about to disappear: its name is not free."""
    if entry is None or (entry.state is WorkerState.FAULTED and not entry.standby.wanted):
        return True
    return entry.state is WorkerState.EXITED and entry.n == 0 and not (entry.on_its_way or entry.stands_by)


def _waiting_in_vain(view: Fleet, returning: Sequence[Worker]) -> tuple[Move, ...]:
    """Entries that wait for devices which will not come back now, the latest first (planner rule 5).

    Never the last of its component that serves or will: that one goes on waiting.
    """
    if not returning:
        return ()
    hoped = len(view.gpus.free) + view.gpus_coming_back() - sum(len(worker.gpus) for worker in returning)
    promised = view.promised()
    short = sum(promised.values()) - hoped
    taken: list[Worker] = []
    waiting = [w for w in view.workers.values() if w.name in promised and w.state is WorkerState.PENDING]
    for worker in sorted(waiting, key=lambda w: (-w.since_s, -w.n)):
        left = view.capacity(worker.component) - sum(other.component == worker.component for other in taken)
        if short > 0 and left > 1:
            taken.append(worker)
            short -= promised[worker.name]
    why = f"the drain of {', '.join(worker.name for worker in returning)} was taken back, so its GPUs stay with it"
    return tuple(Move(M.TAKE_BACK, worker.name, why) for worker in taken)


# --- fewer -------------------------------------------------------------------------------------


def _fewer(view: Fleet, template: Template, count: int, command: Scale, reason: str) -> tuple[Move, ...]:
    component = template.component
    have = view.capacity(component)
    if count > have:
        raise BadTarget(
            f"{count} workers cannot be taken from {component}: it has {have} (leaving and faulted ones do not count)"
        )
    turning = [worker for worker in view.on_their_way(component) if worker.flip is not None]
    first = _takes_back(view, component, count)
    then = victims(view.ready(component), command.victim_policy, command.frees)[: count - len(first)]
    chosen = [*first, *then]
    if len(chosen) < count:
        raise flip_under_way(turning[0], f"`{reason}` of {component}")
    check_not_last(view, chosen, command.force, f"`{reason}` of {component}")
    kept = sleeping.kept_asleep(view, template, then, reason) if command.sleep else {}
    return tuple(kept.get(worker.name) or _spared(worker, reason) for worker in chosen)


def _takes_back(view: Fleet, component: str, count: int) -> tuple[Worker, ...]:
    """At most so many workers on their way; none that changes its role."""
    return arrivals([worker for worker in view.on_their_way(component) if worker.flip is None])[:count]


def _spared(worker: Worker, reason: str) -> Move:
    """One that is being woken, or waits to be, goes on sleeping."""
    return Move(M.SLEEP, worker.name, reason) if TRAITS[worker.state].standby else taken(worker, reason)


def taken(worker: Worker, reason: str) -> Move:
    """How this one goes. One that is called back from a drain may serve already: it is drained again."""
    returns = worker.state is WorkerState.DRAINING and worker.intent is Intent.RETURNING
    if worker.ready or returns or TRAITS[worker.state].standby:
        return Move(M.DRAIN, worker.name, reason)
    return Move(M.TAKE_BACK, worker.name, f"{reason}: it was {worker.state}")


def check_not_last(view: Fleet, going: Sequence[Worker], force: bool, what: str) -> None:
    """Raise `LastReadyWorker` where the component would be left without a ready worker, or without any on its way."""
    if force or not going:
        return
    component, role = going[0].component, going[0].role
    if view.template(component).may_be_none:
        return
    ready = view.ready(component)
    names = {worker.name for worker in going}
    ready_left = [worker for worker in ready if worker.name not in names]
    left = view.capacity(component) - len(going)
    if ready_left or (not ready and left > 0):
        return
    last = ready[0] if ready else going[-1]
    coming = [worker for worker in view.on_their_way(component) if worker.name not in names]
    if coming:
        hint = f"wait until {coming[0].name} ({coming[0].state}) is ready"
    else:
        hint = f"add one first (`dynamo scale {component} +1`)"
    which = "ready worker" if ready else "worker on its way"
    raise LastReadyWorker(
        f"{what} is refused: {last.name} would go, the last {which} of {component} ({role}), and requests to "
        f"{component} would have nowhere to go; {hint}, or insist with --force",
        worker=last.name,
        component=component,
    )


def _why_not_cancellable(worker: Worker) -> str:
    what = f"the drain of {worker.name} cannot be taken back: "
    if worker.state is WorkerState.DRAIN_TIMED_OUT:
        return f"{what}it passed its deadline and its session is being ended; `dynamo scale {worker.component} +1`"
    if worker.state is WorkerState.DRAINING:
        if worker.standby.drained:
            return f"{what}it was asleep, and ends; `dynamo scale {worker.component} +1`"
        return f"{what}it was never ready, so there is nothing to go back to; `dynamo scale {worker.component} +1`"
    return f"{what}it is {worker.state}, not draining"
