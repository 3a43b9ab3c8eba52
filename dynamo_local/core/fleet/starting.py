"""Starts, ends and failures of processes: what follows each, until the next one runs or the entry is gone."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet import sleeping
from dynamo_local.core.fleet.backoff import Fault, RestartHistory, WaitForInfra, after_exit, back_after_outage_s
from dynamo_local.core.fleet.builder import (
    STARTED_AGAIN,
    UNHEARD,
    StepBuilder,
    comes_back_unasked,
    was_leaving,
    why_it_ended,
)
from dynamo_local.core.fleet.effects import (
    EndSession,
    Forget,
    LookAtGpus,
    LookUpKey,
    Report,
    Revoke,
    Spawn,
    Sweep,
    Tell,
)
from dynamo_local.core.fleet.events import GpuReserved, GpusSeen, ProcessGone, ProcessMade, ProcessRefused, SpawnBegun
from dynamo_local.core.fleet.fleet import Exit, Failure, GpusPendingRelease, Intent, Process, Standby, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.notes import Ailing, Elsewhere
from dynamo_local.core.types import Missing
from dynamo_local.core.types import WorkerState as S

RETURN_DEADLINE_S = 30.0
"""A driver takes up to a few seconds to give back a killed process's memory."""
RETURN_POLL_S = 0.1
GPU_POLL_S = 0.5
"""How often devices are looked at for those who wait for a free one."""
RESTART_POLICY = "restart-policy"
"""The cause of what a worker's own failures bring about."""


# --- starting ------------------------------------------------------------------------------------


def start_all(builder: StepBuilder) -> None:
    """Start every worker that waits, as far as there are devices."""
    for worker in builder.workers():
        try_start(builder, worker.name)


def try_start(builder: StepBuilder, name: str) -> None:
    """Start a worker that wants it, if it has its GPUs or they are free now; else they are looked for."""
    worker = builder.worker(name)
    if not worker.wants_start or builder.fleet.leaving is not None:
        return
    needed = builder.template(name).gpus_per_worker
    if len(worker.gpus) != needed:
        if worker.gpus:
            builder.free_gpus(name)
        if len(builder.fleet.gpus.free_for(builder.template(name).vram_share)) < needed:
            builder.look_at_gpus(builder.now_s + GPU_POLL_S)
            return
        builder.take_gpus(name, needed)
    if _waits_for_its_turn(builder, name):
        return
    kind, cause = K.SPAWN_REQUESTED, worker.cause or builder.stimulus_id
    if worker.state is S.BACKING_OFF:
        kind, cause = K.BACKOFF_ELAPSED, RESTART_POLICY
    builder.apply(
        name,
        kind,
        by=cause,
        spawning=True,
        due_s=None,
        turn_s=None,
        launched=builder.template(name).fingerprint,
        spawned_as=None,
    )
    builder.do(Spawn(name, cause, first=builder.worker(name).start.starts == 1))


def _waits_for_its_turn(builder: StepBuilder, name: str) -> bool:
    """Many start at once: it has its GPUs, and a time of its own, which it keeps."""
    worker = builder.worker(name)
    turn_s = worker.start.turn_s
    if turn_s is None:
        turn_s, pace = builder.fleet.pace.take(builder.now_s)
        builder.set(pace=pace)
    if turn_s <= builder.now_s:
        return False
    builder.change(name, turn_s=turn_s, due_s=turn_s, reason=worker.reason or "waits for its turn: many start at once")
    builder.write(name)
    return True


def its_turn(builder: StepBuilder, worker: Worker) -> None:
    """A start that waited for its turn."""
    builder.change(worker.name, due_s=None)
    try_start(builder, worker.name)


def spawn_begun(builder: StepBuilder, seen: SpawnBegun) -> None:
    """Too late to call it off."""
    worker = builder.get(seen.name)
    if worker is not None and worker.start.spawning:
        builder.change(seen.name, spawn_begun=True)


def called_off(builder: StepBuilder, name: str) -> None:
    """It was to leave before its process was begun: nothing was done to its devices, and nothing has to end."""
    if builder.worker(name).intent is Intent.STEADY:
        builder.free_gpus(name)
    after_process(builder, name)


def process_made(builder: StepBuilder, seen: ProcessMade) -> None:
    """It runs. One that was told to leave before it was there, is asked to now."""
    worker = builder.get(seen.name)
    if worker is None or not worker.start.spawning:
        builder.do(EndSession(seen.name, seen.pid))
        return
    leaves = worker.state is S.DRAINING
    process = Process(seen.pid, seen.start_time, builder.now_s, seen.started_at)
    builder.process_began(seen.name, process, keep_reason=leaves)
    builder.decided_anew(name=seen.name)
    spawned = {"pid": seen.pid, "pid_start_time": seen.start_time}
    if leaves:
        builder.apply(seen.name, K.SPAWNED, spawned)
        if builder.fleet.leaving is not None and builder.fleet.leaving.now:
            leaving.end_now(builder, builder.worker(seen.name))
        else:
            leaving.ask(builder, seen.name)
    else:
        due_s = builder.now_s + builder.template(seen.name).start_deadline_s
        builder.apply(seen.name, K.SPAWNED, spawned, due_s=due_s)


def process_refused(builder: StepBuilder, seen: ProcessRefused) -> None:
    """It could not be made: a failure like any other, or the end of one that was leaving anyway."""
    worker = builder.get(seen.name)
    if worker is None or not worker.start.spawning:
        return
    failed: dict[str, Any] = {
        "spawning": False,
        "spawn_begun": False,
        "failure": Failure(builder.now_s, 0.0, seen.unit),
        "reason": f"could not be started: {seen.why}",
        "due_s": None,
    }
    builder.apply(seen.name, K.SPAWN_FAILED, {"reason": seen.why}, **failed)
    after_process(builder, seen.name)


def start_deadline(builder: StepBuilder, worker: Worker) -> None:
    """Past it a worker is ended."""
    deadline_s = builder.template(worker.name).start_deadline_s
    reason = f"was not ready within {deadline_s:g} s"
    details = {"deadline_s": deadline_s}
    builder.apply(worker.name, K.START_DEADLINE_PASSED, details, by="start-deadline", reason=reason)
    leaving.finish(builder, worker)


# --- the end of a process --------------------------------------------------------------------------


def process_gone(builder: StepBuilder, seen: ProcessGone) -> None:
    """A ready worker that left in order was told to by the end of its key, of which we may not have heard yet."""
    worker = builder.with_pid(seen.name, seen.pid)
    if worker is None:
        return
    exit_ = Exit(builder.now_s, seen.code, seen.unit, seen.stimulus_id)
    traits = TRAITS[worker.state]
    if seen.code == 0 and (traits.serves or traits.standby) and worker.lease is not None:
        builder.change(worker.name, exit=exit_)
        builder.do(LookUpKey(worker.name, seen.pid, worker.lease))
    else:
        exited(builder, worker, exit_)


def exited(builder: StepBuilder, worker: Worker, seen: Exit) -> None:
    """Its leases are revoked, what it left behind is ended; what comes after that is `after_process`."""
    worker = sleeping.at_exit(builder, worker, seen.code)
    left = was_leaving(worker, seen.code)
    ran_s = 0.0 if worker.health.ready_s is None else seen.at_s - worker.health.ready_s
    _ended(builder, worker, seen.code, seen.cause, Failure(seen.at_s, ran_s, seen.unit))
    if builder.fleet.leaving is None:
        _sweep(builder, worker.name)
    elif not left:
        failed = builder.worker(worker.name)
        builder.do(Report(failed.name, failed.reason or "it ended", failed.state))


def ended_unseen(builder: StepBuilder, name: str) -> None:
    """A process ended while nobody watched: as if it ended now, with a code that nobody could collect."""
    worker = builder.worker(name)
    _ended(builder, worker, None, builder.stimulus_id, Failure(builder.now_s, 0.0, 0.5))
    _sweep(builder, name)


def _ended(builder: StepBuilder, worker: Worker, code: int | None, cause: str, failure: Failure) -> None:
    """Apply the end of the process, a `failure` unless the worker was to leave. Its leases are revoked."""
    left, reason = was_leaving(worker, code), why_it_ended(worker, code)
    abandoned = 0 if isinstance(worker.load, Missing) else worker.load.abandoned
    details: dict[str, Any] = {"exit_code": code}
    if abandoned:
        details["requests_abandoned"] = abandoned
        builder.do(
            Tell(
                f"{worker.name} left {abandoned} request{'s' * (abandoned != 1)} whose clients did not read: "
                "their answers were ended (`Host: unread-bound-s`)"
            )
        )
    builder.process_ended(worker.name, code)
    if left and worker.leave.lease_gone and worker.leave.requested_at_s is None and worker.intent is Intent.STEADY:
        builder.revoked_outside(worker)
    if worker.state is S.DRAINING and not left:
        builder.apply(worker.name, K.HEALTH_FAILED, {"reason": reason or UNHEARD}, by=leaving.HEALTH)
    counts = not left or comes_back_unasked(worker)
    ended: dict[str, Any] = {"failure": failure if counts else None, "reason": reason}
    builder.apply(worker.name, K.PROCESS_EXITED, details, by=cause, **ended)
    # First those of what is behind it: requests are still sent there.
    for lease in (*worker.other_leases, worker.lease):
        if lease is not None:
            builder.do(Revoke(worker.name, lease))


def _sweep(builder: StepBuilder, name: str) -> None:
    builder.change(name, sweeping=True)
    builder.do(Sweep(name, builder.worker(name).start.spawned_as))


def swept(builder: StepBuilder, name: str) -> None:
    """Nothing runs under its name any more."""
    worker = builder.get(name)
    if worker is None or not worker.ended.sweeping:
        return
    builder.change(name, sweeping=False)
    after_process(builder, name)


def after_process(builder: StepBuilder, name: str) -> None:
    """After the end of a process: a restart, a back-off, a fault, or the end of the entry."""
    worker = builder.worker(name)
    if TRAITS[worker.state].failed:
        builder.do(Report(name, worker.reason or "it failed", worker.state))
    if builder.fleet.leaving is not None:
        return
    if worker.state is S.EXITED:
        if comes_back_unasked(worker):
            after_failure(builder, name)
        elif worker.intent in (Intent.RESTARTING, Intent.RETURNING):
            revive(builder, name, worker.cause or "restart")
        else:
            remove(builder, name)
    elif worker.state is S.START_TIMED_OUT:  # it may have died of its devices: the next start looks for any
        give_back(builder, name, keep=False)
        if builder.worker(name).ended.gpus_pending_release is None:
            after_failure(builder, name)
    elif worker.state is S.CRASHED:
        after_failure(builder, name)
    else:  # it was wanted again before its last process was cleared away
        try_start(builder, name)


def after_failure(builder: StepBuilder, name: str) -> None:
    """Restart with back-off, counted from the end of the process, or give up: `restarts` decides.

    A worker that comes back after somebody else revoked its lease counts as failed. Otherwise a client that revokes
    every lease that it sees would have the worker started again and again without a pause.
    """
    worker = builder.worker(name)
    failure = worker.ended.failure or Failure(builder.now_s, 0.0, 0.5)
    if worker.intent is Intent.LEAVING:  # taken back meanwhile
        builder.apply(name, K.REMOVED, by=RESTART_POLICY, intent=Intent.STEADY)
        remove(builder, name)
        return
    why = (worker.reason or "it failed").removesuffix(STARTED_AGAIN)
    history, verdict = after_exit(
        worker.history,
        now_s=builder.now_s,
        ran_s=failure.ran_s,
        infra_ok=builder.fleet.infra_ok,
        unit=failure.unit,
        why=why,
        policy=builder.fleet.policy,
    )
    if isinstance(verdict, Fault):
        faulted: dict[str, Any] = {"intent": Intent.STEADY, "history": history, "reason": verdict.reason}
        builder.apply(name, K.FAULTED, {"reason": verdict.reason}, by=RESTART_POLICY, **faulted)
        text = f"{name} is faulted: {verdict.reason}; `dynamo restart {name}` tries again"
        builder.do(Tell(text, Ailing(name)))
        give_back(builder, name, keep=False)
        return
    waits = isinstance(verdict, WaitForInfra)
    due_s = None if waits else max(builder.now_s, failure.at_s + verdict.delay_s)
    waiting: dict[str, Any] = {"waiting_for_infra": waits, "due_s": due_s, "intent": Intent.STEADY}
    delay = {"delay_s": verdict.delay_s}
    builder.apply(name, K.BACKOFF_STARTED, delay, by=RESTART_POLICY, history=history, **waiting)


def backoff_over(builder: StepBuilder, worker: Worker) -> None:
    """Start it again, on its own devices if it can have them; while etcd or NATS is away, when they are back."""
    if builder.fleet.infra_ok:
        builder.change(worker.name, due_s=None)
        regain_gpus(builder, worker.name)
    else:
        builder.change(worker.name, due_s=None, waiting_for_infra=True)


def infra_is_back(builder: StepBuilder) -> None:
    """Start all workers that failed during the outage again: spread over some seconds, counted from now."""
    for worker in builder.workers():
        if worker.ended.waiting_for_infra:
            unit = 0.5 if worker.ended.failure is None else worker.ended.failure.unit
            due_s = builder.now_s + back_after_outage_s(unit, builder.fleet.policy)
            builder.change(worker.name, waiting_for_infra=False, due_s=due_s)


def revive(builder: StepBuilder, name: str, stimulus_id: str) -> None:
    """Start a worker that has no process again, under its name; its failures are forgotten."""
    fresh: dict[str, Any] = {
        "history": RestartHistory(),
        "due_s": None,
        "waiting_for_infra": False,
        "cause": stimulus_id,
    }
    builder.apply(name, K.RESTART_REQUESTED, by=stimulus_id, intent=Intent.STEADY, **fresh)
    regain_gpus(builder, name)


def remove(builder: StepBuilder, name: str) -> None:
    """No process any more: its GPUs go back, a suffixed entry goes with it, the bare one stays as a template."""
    give_back(builder, name, keep=False)
    if builder.worker(name).ended.gpus_pending_release is None:
        _removed(builder, name)


def _removed(builder: StepBuilder, name: str) -> None:
    builder.do(Forget(name))
    worker, template = builder.worker(name), builder.template(name)
    if worker.stays_as_template and not template.retired:
        builder.change(name, intent=Intent.STEADY, failure=None, standby=Standby())
        return
    builder.drop(name)
    if template.retired and not builder.fleet.of(template.component):
        builder.set(templates=tuple(each for each in builder.fleet.templates if each != template))


# --- GPUs ------------------------------------------------------------------------------------------


def give_back(builder: StepBuilder, name: str, *, keep: bool) -> None:
    """Its devices go back, or are kept for its next process, once their memory is seen to be returned."""
    if not builder.worker(name).gpus:
        builder.change(name, gpus_pending_release=None)
        return
    builder.change(name, gpus_pending_release=GpusPendingRelease(builder.now_s, keep))
    builder.look_at_gpus(builder.now_s)


def regain_gpus(builder: StepBuilder, name: str) -> None:
    """The devices of the process that is gone, for the next one; where they cannot be had, any are looked for."""
    builder.lock(name)  # an adopted worker took its own locks along
    give_back(builder, name, keep=True)
    try_start(builder, name)


def gpus_seen(builder: StepBuilder, seen: GpusSeen) -> None:
    """A new sample: devices come back, and those who wait for some may start, the longest waiting first."""
    builder.set(looking=False)
    if seen.stale is None:
        builder.set(gpus=builder.fleet.gpus.observe(seen.devices, elsewhere=seen.elsewhere))
        builder.set(host_free_bytes=seen.host_free_bytes)
        _end_quarantines(builder)
    for worker in builder.workers():
        if worker.ended.gpus_pending_release is not None:
            _returned(builder, worker, worker.ended.gpus_pending_release, seen.stale)
    sleeping.advance(builder)  # a sleeper can only have its own devices
    for worker in sorted(builder.workers(), key=lambda worker: worker.since_s):
        if worker.name in builder.fleet.workers:
            try_start(builder, worker.name)


def _end_quarantines(builder: StepBuilder) -> None:
    """End those of devices that are now seen to be empty: their holder has ended, or was not visible before."""
    ledger = builder.fleet.gpus
    for uuid in builder.fleet.gpus.quarantined:
        if uuid in ledger.vanished or ledger.occupant(uuid) is not None:
            continue
        ledger = ledger.restore(uuid)
        text = f"GPU {ledger.by_uuid[uuid].index} ({uuid}) is seen to be empty: its quarantine ends"
        builder.do(Tell(text, Elsewhere()))
    builder.set(gpus=ledger)


def _returned(builder: StepBuilder, worker: Worker, returning: GpusPendingRelease, stale: str | None) -> None:
    """Only a look that succeeded counts: while there is none, any of the devices may still be occupied."""
    ledger = builder.fleet.gpus
    who = {uuid: ledger.occupant(uuid) for uuid in worker.gpus}
    busy = [uuid for uuid in worker.gpus if stale is not None or who[uuid] is not None]
    if busy and builder.now_s <= returning.since_s + RETURN_DEADLINE_S:
        builder.look_at_gpus(builder.now_s + RETURN_POLL_S)
        return
    builder.change(worker.name, gpus_pending_release=None)
    gone = worker.state is S.EXITED and not worker.ended.sweeping  # else the entry goes when that is done
    if gone or busy or not returning.keep:
        late = f"{RETURN_DEADLINE_S:g} s after {worker.name} ended"
        unseen = f"nobody could see whether {worker.name} left its memory empty: {stale}"
        reasons = {uuid: unseen if stale is not None else f"{who[uuid]} still holds it {late}" for uuid in busy}
        builder.free_gpus(worker.name, reasons)
    if gone:
        _removed(builder, worker.name)
    elif worker.state is S.START_TIMED_OUT:
        after_failure(builder, worker.name)


def gpu_reserved(builder: StepBuilder, seen: GpuReserved) -> None:
    """Another namespace was quicker. The worker that was to be started on that device looks for others."""
    builder.set(gpus=builder.fleet.gpus.reserved_elsewhere(seen.uuid, seen.who))
    holder = builder.fleet.gpus.holder_of.get(seen.uuid)
    worker = None if holder is None else builder.get(holder)
    if worker is not None and not worker.runs and not worker.start.spawning:
        builder.free_gpus(worker.name)
        builder.change(worker.name, gpus_pending_release=None)
        builder.look_at_gpus(builder.now_s + GPU_POLL_S)


def look(builder: StepBuilder) -> None:
    """Sample the devices. If a sample is already running, another one follows it: that one began too early."""
    if not builder.fleet.looking:
        builder.set(look_s=None, looking=True)
        builder.do(LookAtGpus())
