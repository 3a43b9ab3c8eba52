"""Invariants of every fleet: tests and the simulation check them after each step."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_local.core.fleet.fleet import Fleet, Intent, Worker
from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.core.types import WorkerState as S
from dynamo_local.core.types import watcher_name


class Violated(AssertionError):
    """A fleet that cannot be."""


def validate(fleet: Fleet) -> None:
    """Raises `Violated` that names every broken rule; returns nothing for a fleet that can be."""
    broken = [
        *_of_gpus(fleet),
        *_of_flips(fleet),
        *(why for worker in fleet.workers.values() for why in _of_worker(fleet, worker)),
    ]
    if broken:
        raise Violated("; ".join(broken))


def _of_gpus(fleet: Fleet) -> Iterator[str]:
    """No device with two holders; the ledger and the workers say the same; every device is in one place."""
    ledger = fleet.gpus
    booked = {name: uuids for name, uuids in ledger.held_uuids.items() if uuids}
    mine = {worker.name: worker.gpus for worker in fleet.workers.values() if worker.gpus}
    if booked != mine:
        yield f"the ledger says {booked}, the workers {mine}"
    held = [uuid for uuids in booked.values() for uuid in uuids]
    for name in ledger.sleepers:
        sleeper = fleet.workers.get(name)
        if sleeper is None or not sleeper.runs or sleeper.gpus:
            yield f"{name} is booked as asleep, and is {sleeper}"
    parts = [*held, *ledger.quarantined, *ledger.taken, *(device.uuid for device in ledger.free)]
    if sorted(parts) != sorted(device.uuid for device in ledger.devices):
        yield f"devices are counted as {sorted(parts)}, there are {[device.uuid for device in ledger.devices]}"


def _of_flips(fleet: Fleet) -> Iterator[str]:
    """A process is in one role. A worker that changes it has a name reserved, which no other worker has or gets."""
    workers = fleet.workers.values()
    for what, values in (
        ("pid", [worker.pid for worker in workers if worker.pid is not None]),
        ("name at birth", [worker.spawn_name for worker in workers if worker.runs or worker.start.spawning]),
        ("name to become", [worker.flip.name for worker in workers if worker.flip is not None]),
    ):
        if len(set(values)) < len(values):
            yield f"two workers have the same {what}: {sorted(map(str, values))}"
    for worker in workers:
        if (worker.flip is not None) is not (worker.state is S.FLIPPING):
            yield f"{worker.name} is {worker.state}, and becomes {worker.flip}"
        kept = None if worker.flip is None else fleet.workers.get(worker.flip.name)
        if kept is not None and kept.state is not S.EXITED:
            yield f"{worker.name} becomes {kept.name}, which is {kept.state}"


def _of_worker(fleet: Fleet, worker: Worker) -> Iterator[str]:
    who, traits = f"{worker.name} ({worker.state}/{worker.intent})", TRAITS[worker.state]
    if worker.name != watcher_name(fleet.namespace, worker.component, worker.n):
        yield f"{who} is not called as its component and suffix say"
    has = worker.runs or worker.start.spawning
    if traits.process is HasProcess.NO and has:
        yield f"{who} has a process, or one that is being made"
    if traits.process is HasProcess.YES and not has:
        yield f"{who} has no process, and none is being made"
    if worker.runs and worker.start.spawning:
        yield f"{who} has a process and another one is being made"
    if worker.start.spawn_begun and not worker.start.spawning:
        yield f"{who} has a process begun that was not to be made"
    if has and (worker.ended.sweeping or worker.ended.gpus_pending_release is not None):
        yield f"{who} has a process while the last one's remains are cleared"
    if traits.serves and not worker.health.served:
        yield f"{who} serves and never was ready"
    asleep = worker.name in fleet.gpus.sleepers
    if traits.asleep and not asleep:
        yield f"{who} sleeps, and what it keeps is not booked"
    whole = asleep or fleet.outdated(worker) or len(worker.gpus) >= fleet.template_of(worker).gpus_per_worker
    if has and not whole:
        yield f"{who} runs on {len(worker.gpus)} GPUs, fewer than it needs"
    if worker.state is S.FAULTED and worker.gpus and worker.ended.gpus_pending_release is None:
        yield f"{who} holds GPUs that it does not give back"
    if worker.intent is Intent.RETURNING and worker.state not in (S.DRAINING, S.DRAIN_TIMED_OUT, S.EXITED):
        yield f"{who} is called back from no drain"
    if worker.intent is Intent.LEAVING and traits.process is not HasProcess.ENDING:
        yield f"{who} is waited for, though nothing of it is being ended"
    if fleet.leaving is None and (why := _forgotten(fleet, worker)):
        yield f"{who} is forgotten: {why}"


def _forgotten(fleet: Fleet, worker: Worker) -> str | None:
    """Why nothing will move on a worker that is on its way, or leaves by our order; None if something will."""
    clearing = worker.ended.sweeping or worker.ended.gpus_pending_release is not None
    looks = fleet.look_s is not None or fleet.looking
    if worker.ended.gpus_pending_release is not None and not looks:
        return "nobody looks whether its GPUs come back"
    if worker.ended.waiting_for_infra and fleet.infra_ok:
        return "it waits for etcd and NATS, which answer"
    if worker.state in (S.FALLING_ASLEEP, S.WAKING) and worker.due_s is None:
        return "no deadline for its order"
    if worker.state is S.STARTING and worker.runs and worker.due_s is None:
        return "no deadline for its start"
    if worker.flip is not None and not worker.flip.asking and worker.due_s is None:
        return "nobody asks how far its change of role is"
    if worker.state is S.DRAINING and worker.runs and worker.leave.requested_at_s is not None:
        return None if worker.due_s is not None or worker.leave.counting else "no deadline for its drain"
    if TRAITS[worker.state].waits and not (
        clearing or worker.ended.waiting_for_infra or worker.due_s is not None or looks
    ):
        return "nothing starts it"
    if TRAITS[worker.state].process is HasProcess.ENDING and not (worker.runs or clearing):
        return "its process is gone and nothing follows"
    return None
