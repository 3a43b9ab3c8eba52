"""Starts, ends and failures of processes: what follows each, until the next one runs or the entry is gone."""

from __future__ import annotations

from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet import sleeping
from dynamo_local.core.fleet.backoff import Fault, RestartHistory, WaitForInfra, after_exit, back_after_outage_s
from dynamo_local.core.fleet.builder import STARTED_AGAIN, UNHEARD, Draft, comes_back_unasked, was_leaving, why_it_ended
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
from dynamo_local.core.fleet.fleet import Course, Exit, Failure, GpuReturn, Process, Standby, Worker
from dynamo_local.core.fleet.lifecycle import (
    BackoffElapsed,
    BackoffStarted,
    Faulted,
    HealthFailed,
    ProcessExited,
    Removed,
    RestartRequested,
    Spawned,
    SpawnFailed,
    SpawnRequested,
    StartDeadlinePassed,
)
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.notes import Ailing, Elsewhere
from dynamo_local.core.types import WorkerState as S

RETURN_DEADLINE_S = 30.0
"""A driver takes up to a few seconds to give back a killed process's memory."""
RETURN_POLL_S = 0.1
GPU_POLL_S = 0.5
"""How often devices are looked at for those who wait for a free one."""
RESTART_POLICY = "restart-policy"
"""The cause of what a worker's own failures bring about."""


# --- starting ------------------------------------------------------------------------------------


def start_all(draft: Draft) -> None:
    """Start every worker that waits, as far as there are devices."""
    for worker in draft.workers():
        try_start(draft, worker.name)


def try_start(draft: Draft, name: str) -> None:
    """Start a worker that wants it, if it has its GPUs or they are free now; else they are looked for."""
    worker = draft.worker(name)
    if not worker.wants_start or draft.fleet.leaving is not None:
        return
    needed = draft.template(name).gpus_per_worker
    if len(worker.gpus) != needed:
        if worker.gpus:
            draft.free_gpus(name)
        if len(draft.fleet.gpus.free_for(draft.template(name).vram_share)) < needed:
            draft.look_at_gpus(draft.now_s + GPU_POLL_S)
            return
        draft.take_gpus(name, needed)
    cause = worker.cause or draft.stimulus_id
    backs_off = worker.state is S.BACKING_OFF
    event = BackoffElapsed(stimulus_id=RESTART_POLICY) if backs_off else SpawnRequested(stimulus_id=cause)
    draft.apply(name, event, spawning=True, due_s=None, launched=draft.template(name).fingerprint, born=None)
    draft.do(Spawn(name, event.stimulus_id, first=draft.worker(name).starts == 1))


def spawn_begun(draft: Draft, seen: SpawnBegun) -> None:
    """Too late to call it off."""
    worker = draft.get(seen.name)
    if worker is not None and worker.spawning:
        draft.change(seen.name, write=False, spawn_begun=True)


def called_off(draft: Draft, name: str) -> None:
    """It was to leave before its process was begun: nothing was done to its devices, and nothing has to end."""
    if draft.worker(name).course is Course.STEADY:
        draft.free_gpus(name)
    after_process(draft, name)


def process_made(draft: Draft, seen: ProcessMade) -> None:
    """It runs. One that was told to leave before it was there, is asked to now."""
    worker = draft.get(seen.name)
    if worker is None or not worker.spawning:
        draft.do(EndSession(seen.name, seen.pid))
        return
    leaves = worker.state is S.DRAINING
    process = Process(seen.pid, seen.start_time, draft.now_s, seen.started_at)
    draft.process_began(seen.name, process, keep_reason=leaves)
    draft.decided_anew(name=seen.name)
    event = Spawned(stimulus_id=seen.stimulus_id, pid=seen.pid, pid_start_time=seen.start_time)
    if leaves:
        draft.apply(seen.name, event)
        if draft.fleet.leaving is not None and draft.fleet.leaving.now:
            leaving.end_now(draft, draft.worker(seen.name))
        else:
            leaving.ask(draft, seen.name)
    else:
        draft.apply(seen.name, event, due_s=draft.now_s + draft.template(seen.name).start_deadline_s)


def process_refused(draft: Draft, seen: ProcessRefused) -> None:
    """It could not be made: a failure like any other, or the end of one that was leaving anyway."""
    worker = draft.get(seen.name)
    if worker is None or not worker.spawning:
        return
    failure = Failure(draft.now_s, 0.0, seen.unit)
    event = SpawnFailed(stimulus_id=seen.stimulus_id, reason=seen.why)
    reason = f"could not be started: {seen.why}"
    draft.apply(seen.name, event, spawning=False, spawn_begun=False, failure=failure, reason=reason, due_s=None)
    after_process(draft, seen.name)


def start_deadline(draft: Draft, worker: Worker) -> None:
    """Past it a worker is ended."""
    deadline_s = draft.template(worker.name).start_deadline_s
    reason = f"was not ready within {deadline_s:g} s"
    event = StartDeadlinePassed(stimulus_id="start-deadline", deadline_s=deadline_s)
    draft.apply(worker.name, event, reason=reason)
    leaving.finish(draft, worker)


# --- the end of a process --------------------------------------------------------------------------


def process_gone(draft: Draft, seen: ProcessGone) -> None:
    """A ready worker that left in order was told to by the end of its key, of which we may not have heard yet."""
    worker = draft.with_pid(seen.name, seen.pid)
    if worker is None:
        return
    exit_ = Exit(draft.now_s, seen.code, seen.unit, seen.stimulus_id)
    traits = TRAITS[worker.state]
    if seen.code == 0 and (traits.serves or traits.standby) and worker.lease is not None:
        draft.change(worker.name, write=False, exit=exit_)
        draft.do(LookUpKey(worker.name, seen.pid, worker.lease))
    else:
        exited(draft, worker, exit_)


def exited(draft: Draft, worker: Worker, seen: Exit) -> None:
    """Its leases are revoked, what it left behind is ended; what comes after that is `after_process`."""
    worker = sleeping.at_exit(draft, worker, seen.code)
    left = was_leaving(worker, seen.code)
    ran_s = 0.0 if worker.ready_s is None else seen.at_s - worker.ready_s
    event = ProcessExited(stimulus_id=seen.cause, exit_code=seen.code)
    _ended(draft, worker, event, Failure(seen.at_s, ran_s, seen.unit))
    if draft.fleet.leaving is None:
        _sweep(draft, worker.name)
    elif not left:
        failed = draft.worker(worker.name)
        draft.do(Report(failed.name, failed.reason or "it ended", failed.state))


def ended_unseen(draft: Draft, name: str) -> None:
    """A process ended while nobody watched: as if it ended now, with a code that nobody could collect."""
    worker = draft.worker(name)
    event = ProcessExited(stimulus_id=draft.stimulus_id, exit_code=None)
    _ended(draft, worker, event, Failure(draft.now_s, 0.0, 0.5))
    _sweep(draft, name)


def _ended(draft: Draft, worker: Worker, event: ProcessExited, failure: Failure) -> None:
    """Apply the end of the process; it is a `failure` unless the worker was to leave. Its leases are revoked."""
    left, reason = was_leaving(worker, event.exit_code), why_it_ended(worker, event.exit_code)
    draft.process_ended(worker.name, event.exit_code)
    if left and worker.lease_gone and worker.asked_s is None and worker.course is Course.STEADY:
        draft.revoked_outside(worker)
    if worker.state is S.DRAINING and not left:
        draft.apply(worker.name, HealthFailed(stimulus_id=leaving.HEALTH, reason=reason or UNHEARD))
    counts = not left or comes_back_unasked(worker)
    draft.apply(worker.name, event, failure=failure if counts else None, reason=reason)
    # First those of what is behind it: requests are still sent there.
    for lease in (*worker.other_leases, worker.lease):
        if lease is not None:
            draft.do(Revoke(worker.name, lease))


def _sweep(draft: Draft, name: str) -> None:
    draft.change(name, write=False, sweeping=True)
    draft.do(Sweep(name, draft.worker(name).born))


def swept(draft: Draft, name: str) -> None:
    """Nothing runs under its name any more."""
    worker = draft.get(name)
    if worker is None or not worker.sweeping:
        return
    draft.change(name, write=False, sweeping=False)
    after_process(draft, name)


def after_process(draft: Draft, name: str) -> None:
    """What follows the end of a process: a restart, a back-off, a fault, or the end of the entry."""
    worker = draft.worker(name)
    if TRAITS[worker.state].failed:
        draft.do(Report(name, worker.reason or "it failed", worker.state))
    if draft.fleet.leaving is not None:
        return
    if worker.state is S.EXITED:
        if comes_back_unasked(worker):
            after_failure(draft, name)
        elif worker.course in (Course.RESTARTING, Course.RETURNING):
            revive(draft, name, worker.cause or "restart")
        else:
            remove(draft, name)
    elif worker.state is S.START_TIMED_OUT:  # it may have died of its devices: the next start looks for any
        give_back(draft, name, keep=False)
        if draft.worker(name).returning is None:
            after_failure(draft, name)
    elif worker.state is S.CRASHED:
        after_failure(draft, name)
    else:  # it was wanted again before its last process was cleared away
        try_start(draft, name)


def after_failure(draft: Draft, name: str) -> None:
    """Restart with back-off, counted from the end of the process, or give up: `restarts` decides.

    A worker that comes back after a lease that somebody else revoked is counted as one that failed: whoever revokes
    every lease as soon as he sees it would else have it started again and again without a pause.
    """
    worker = draft.worker(name)
    failure = worker.failure or Failure(draft.now_s, 0.0, 0.5)
    if worker.course is Course.LEAVING:  # taken back meanwhile
        draft.apply(name, Removed(stimulus_id=RESTART_POLICY), course=Course.STEADY)
        remove(draft, name)
        return
    why = (worker.reason or "it failed").removesuffix(STARTED_AGAIN)
    history, verdict = after_exit(
        worker.history,
        now_s=draft.now_s,
        ran_s=failure.ran_s,
        infra_ok=draft.fleet.infra_ok,
        unit=failure.unit,
        why=why,
        policy=draft.fleet.policy,
    )
    if isinstance(verdict, Fault):
        event = Faulted(stimulus_id=RESTART_POLICY, reason=verdict.reason)
        draft.apply(name, event, course=Course.STEADY, history=history, reason=verdict.reason)
        told = f"{name} is faulted: {verdict.reason}; `dynamo restart {name}` tries again"
        draft.do(Tell(told, Ailing(name)))
        give_back(draft, name, keep=False)
        return
    waits = isinstance(verdict, WaitForInfra)
    due_s = None if waits else max(draft.now_s, failure.at_s + verdict.delay_s)
    event_ = BackoffStarted(stimulus_id=RESTART_POLICY, delay_s=verdict.delay_s)
    draft.apply(name, event_, course=Course.STEADY, history=history, held_back=waits, due_s=due_s)


def backoff_over(draft: Draft, worker: Worker) -> None:
    """Start it again, on its own devices if it can have them; while etcd or NATS is away, when they are back."""
    if draft.fleet.infra_ok:
        draft.change(worker.name, write=False, due_s=None)
        regain_gpus(draft, worker.name)
    else:
        draft.change(worker.name, write=False, due_s=None, held_back=True)


def infra_is_back(draft: Draft) -> None:
    """Start all workers that failed during the outage again: spread over some seconds, counted from now."""
    for worker in draft.workers():
        if worker.held_back:
            unit = 0.5 if worker.failure is None else worker.failure.unit
            due_s = draft.now_s + back_after_outage_s(unit, draft.fleet.policy)
            draft.change(worker.name, write=False, held_back=False, due_s=due_s)


def revive(draft: Draft, name: str, stimulus_id: str) -> None:
    """Start a worker that has no process again, under its name; its failures are forgotten."""
    event = RestartRequested(stimulus_id=stimulus_id)
    fresh = {"history": RestartHistory(), "due_s": None, "held_back": False, "cause": stimulus_id}
    draft.apply(name, event, course=Course.STEADY, **fresh)
    regain_gpus(draft, name)


def remove(draft: Draft, name: str) -> None:
    """No process any more: its GPUs go back, a suffixed entry goes with it, the bare one stays as a template."""
    give_back(draft, name, keep=False)
    if draft.worker(name).returning is None:
        _removed(draft, name)


def _removed(draft: Draft, name: str) -> None:
    draft.do(Forget(name))
    worker, template = draft.worker(name), draft.template(name)
    if worker.stays_as_template and not template.retired:
        draft.change(name, course=Course.STEADY, failure=None, standby=Standby())
        return
    draft.drop(name)
    if template.retired and not draft.fleet.of(template.component):
        draft.set(templates=tuple(each for each in draft.fleet.templates if each != template))


# --- GPUs ------------------------------------------------------------------------------------------


def give_back(draft: Draft, name: str, *, keep: bool) -> None:
    """Its devices go back, or are kept for its next process, once their memory is seen to be returned."""
    if not draft.worker(name).gpus:
        draft.change(name, write=False, returning=None)
        return
    draft.change(name, write=False, returning=GpuReturn(draft.now_s, keep))
    draft.look_at_gpus(draft.now_s)


def regain_gpus(draft: Draft, name: str) -> None:
    """The devices of the process that is gone, for the next one; where they cannot be had, any are looked for."""
    draft.lock(name)  # an adopted worker took its own locks along
    give_back(draft, name, keep=True)
    try_start(draft, name)


def gpus_seen(draft: Draft, seen: GpusSeen) -> None:
    """A new sample: devices come back, and those who wait for some may start, the longest waiting first."""
    draft.set(looking=False)
    if seen.stale is None:
        draft.set(gpus=draft.fleet.gpus.observe(seen.devices, elsewhere=seen.elsewhere))
        draft.set(host_free_bytes=seen.host_free_bytes)
        _end_quarantines(draft)
    for worker in draft.workers():
        if worker.returning is not None:
            _returned(draft, worker, worker.returning, seen.stale)
    sleeping.advance(draft)  # a sleeper can only have its own devices
    for worker in sorted(draft.workers(), key=lambda worker: worker.since_s):
        if worker.name in draft.fleet.workers:
            try_start(draft, worker.name)


def _end_quarantines(draft: Draft) -> None:
    """Of devices that are seen to be empty after all: whoever held them has ended, or could not be looked at before."""
    ledger = draft.fleet.gpus
    for uuid in draft.fleet.gpus.quarantined:
        if uuid in ledger.vanished or ledger.occupant(uuid) is not None:
            continue
        ledger = ledger.restore(uuid)
        told = f"GPU {ledger.by_uuid[uuid].index} ({uuid}) is seen to be empty: its quarantine ends"
        draft.do(Tell(told, Elsewhere()))
    draft.set(gpus=ledger)


def _returned(draft: Draft, worker: Worker, returning: GpuReturn, stale: str | None) -> None:
    """Only a look that succeeded counts: while there is none, any of the devices may still be occupied."""
    ledger = draft.fleet.gpus
    who = {uuid: ledger.occupant(uuid) for uuid in worker.gpus}
    busy = [uuid for uuid in worker.gpus if stale is not None or who[uuid] is not None]
    if busy and draft.now_s <= returning.since_s + RETURN_DEADLINE_S:
        draft.look_at_gpus(draft.now_s + RETURN_POLL_S)
        return
    draft.change(worker.name, write=False, returning=None)
    gone = worker.state is S.EXITED and not worker.sweeping  # else the entry goes when that is done
    if gone or busy or not returning.keep:
        late = f"{RETURN_DEADLINE_S:g} s after {worker.name} ended"
        unseen = f"nobody could see whether {worker.name} left its memory empty: {stale}"
        reasons = {uuid: unseen if stale is not None else f"{who[uuid]} still holds it {late}" for uuid in busy}
        draft.free_gpus(worker.name, reasons)
    if gone:
        _removed(draft, worker.name)
    elif worker.state is S.START_TIMED_OUT:
        after_failure(draft, worker.name)


def gpu_reserved(draft: Draft, seen: GpuReserved) -> None:
    """Another namespace was quicker. Whoever was to be started on that device looks for others."""
    draft.set(gpus=draft.fleet.gpus.reserved_elsewhere(seen.uuid, seen.who))
    holder = draft.fleet.gpus.holder_of.get(seen.uuid)
    worker = None if holder is None else draft.get(holder)
    if worker is not None and not worker.runs and not worker.spawning:
        draft.free_gpus(worker.name)
        draft.change(worker.name, write=False, returning=None)
        draft.look_at_gpus(draft.now_s + GPU_POLL_S)


def look(draft: Draft) -> None:
    """It is time to look at the devices. A look that is under way was begun too early: there is one more after it."""
    if not draft.fleet.looking:
        draft.set(look_s=None, looking=True)
        draft.do(LookAtGpus())
