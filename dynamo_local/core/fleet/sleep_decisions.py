"""`sleep` and `wake` as decisions, and who is woken when more workers are wanted: a fleet in, moves or a refusal out.

The rules, in prose:

* Only workers whose component has `standby` in its configuration sleep: their engines were made, and rehearsed, for it.
* Unforced, the last ready worker of a component is not put to sleep.
* A sleeper is woken on its own devices, because its process is pinned to them. Where somebody holds one the wake is
  refused, and says who; where all of those leave it waits until they are gone.
* One that is still to be put to sleep is just left awake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_local.core.fleet.fleet import Fleet, Template, Worker
from dynamo_local.core.fleet.moves import PutToSleep, ScalingDecision, WakeUp
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import gib
from dynamo_local.core.types import Missing
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError, NotEnoughMemory, NotSleepable, NotWakeable

LEVELS = (1, 2)


def decide_sleep(view: Fleet, name: str, level: int, *, stimulus_id: str) -> ScalingDecision:
    """`dynamo sleep NAME`. Nothing for one that sleeps, or will, at that level.

    `refused` is `UnknownWorker`, `NotSleepable` or `NotEnoughMemory`. Whether it is the last that serves is for the
    caller to check (`scaling.check_not_last`).
    """
    try:
        worker = view.worker(name)
        return ScalingDecision(stimulus_id, tuple(_to_sleep(view, worker, level)))
    except DynamoError as refusal:
        return ScalingDecision(stimulus_id, refused=refusal)


def _to_sleep(view: Fleet, worker: Worker, level: int) -> Iterator[PutToSleep]:
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
    yield PutToSleep(worker.name, level, "sleep")


def _check_host_memory(view: Fleet, worker: Worker, level: int) -> None:
    needed, free = worker.standby.host_bytes, view.host_free_bytes
    if level != 1 or isinstance(needed, Missing) or isinstance(free, Missing) or needed <= free:
        return
    raise NotEnoughMemory(
        f"{worker.name} cannot sleep at level 1: that takes {gib(needed)} of main memory for its weights, {gib(free)} "
        f"are free; `dynamo sleep {worker.name} --level 2` keeps none there, and reads the weights again when it wakes"
    )


def decide_wake(view: Fleet, name: str, *, stimulus_id: str) -> ScalingDecision:
    """`dynamo wake NAME`. Nothing for one that serves or is being woken.

    `refused` is `UnknownWorker` or `NotWakeable`, which names whoever holds its devices.
    """
    try:
        worker = view.worker(name)
        if worker.ready or worker.state is S.WAKING or (TRAITS[worker.state].asleep and not worker.standby.wanted):
            return ScalingDecision(stimulus_id)
        if not worker.stands_by:
            raise NotWakeable(f"{worker.name} is {worker.state}, and not asleep: there is nothing to wake")
        return ScalingDecision(stimulus_id, (wake_up(view, worker, "wake"),))
    except DynamoError as refusal:
        return ScalingDecision(stimulus_id, refused=refusal)


def wake_up(view: Fleet, worker: Worker, reason: str) -> WakeUp:
    """The move that wakes this one. Raises `NotWakeable`."""
    if not TRAITS[worker.state].asleep:
        return WakeUp(worker.name, reason=reason)
    why = view.gpus.why_not_woken(worker.name, view.template_of(worker).vram_share)
    if why is None:
        return WakeUp(worker.name, reason=reason)
    if _holders_leave(view, worker):
        return WakeUp(worker.name, waits=True, reason=reason)
    raise NotWakeable(
        f"{worker.name} cannot be woken on its GPUs, to which its process is pinned: {why}; free them, or start "
        f"another worker elsewhere (`dynamo scale {worker.component} +1 --no-wake`)"
    )


def waits_in_vain(view: Fleet, worker: Worker) -> str | None:
    """Why a sleeper that waits for its devices will not get them; None while it may."""
    why = view.gpus.why_not_woken(worker.name, view.template_of(worker).vram_share)
    return why if why is not None and not _holders_leave(view, worker) else None


def _holders_leave(view: Fleet, worker: Worker) -> bool:
    """Somebody of ours holds its devices, and all of those leave (or fall asleep)."""
    uuids = view.gpus.sleepers[worker.name].uuids
    holders = [view.workers[who] for uuid in uuids if (who := view.gpus.holder_of.get(uuid)) is not None]
    return bool(holders) and not any(each.counts or each.stands_by for each in holders)


def kept_asleep(view: Fleet, template: Template, going: Sequence[Worker], reason: str) -> dict[str, PutToSleep]:
    """Of ready workers that are given up those that sleep instead, by name: as many as the component is to keep on
    standby and does not have. `_keep` would start others for that."""
    there = sum(worker.stands_by for worker in view.of(template.component))
    moves: dict[str, PutToSleep] = {}
    for worker in going:
        if len(moves) + there >= (template.standby or 0):
            break
        if decide_sleep(view, worker.name, LEVELS[0], stimulus_id=reason).moves:
            moves[worker.name] = PutToSleep(worker.name, LEVELS[0], reason)
    return moves


def woken_first(view: Fleet, component: str, count: int, reason: str) -> tuple[WakeUp, ...]:
    """At most so many workers on standby that can serve soon: the ones nearest to it first."""
    order = {S.FALLING_ASLEEP: 0, S.SLEEPING: 1, S.STARTING: 2}
    there = [worker for worker in view.of(component) if worker.stands_by]
    there.sort(key=lambda w: (order.get(w.state, 3), w.standby.level, w.n))
    moves: list[WakeUp] = []
    ledger, share = view.gpus, view.template(component).vram_share
    for worker in there:
        if len(moves) == count:
            break
        if TRAITS[worker.state].asleep:
            if ledger.why_not_woken(worker.name, share) is not None:
                continue
            ledger = ledger.wake(worker.name, share)
        moves.append(WakeUp(worker.name, reason=f"{reason}: it was {worker.state}"))
    return tuple(moves)
