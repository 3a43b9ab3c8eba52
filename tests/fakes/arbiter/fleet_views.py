"""Fleets as values, in a line each: `fleet("ready", "draining@3")` is the bare worker and `_1`."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

from dynamo_local.core.fleet.fleet import (
    Fleet,
    FlipTarget,
    GpusPendingRelease,
    Intent,
    Process,
    Standby,
    Template,
    Worker,
)
from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.core.gpus import GpuLedger, Sleeper
from dynamo_local.core.types import Load, Missing, Role, WorkerState, lease_hex, watcher_name
from dynamo_local.system.gpus import SimInventory

DECODE = Template("VllmWorker", Role.DECODE, gpus_per_worker=1, flips_to="PrefillWorker")
PREFILL = Template("PrefillWorker", Role.PREFILL, gpus_per_worker=1, flips_to="VllmWorker")
FRONTEND = Template("Frontend", Role.FRONTEND, max_workers=1)
TEMPLATES = (DECODE, PREFILL, FRONTEND)

FIRST_PID = 1000
"""The pid of the bare decode worker; `_1` is the next one. Those of other roles are hundreds further on."""
RESIDUE_BYTES = 1024**3
"""What a worker that sleeps keeps on its device, and in main memory."""
NOT_DUE_S = 1e6
"""Deadlines of workers that are made here: far away, unless a test says otherwise."""


DUE = (
    WorkerState.STARTING,
    WorkerState.DRAINING,
    WorkerState.DRAIN_TIMED_OUT,
    WorkerState.BACKING_OFF,
    WorkerState.FALLING_ASLEEP,
    WorkerState.WAKING,
)


def name(n: int = 0, component: str = "VllmWorker") -> str:
    """`dynamo_VllmWorker_2`"""
    return watcher_name("dynamo", component, n)


def pid_of(n: int, template: Template = DECODE) -> int:
    """The pid of a worker that was made here and has a process."""
    return FIRST_PID + 100 * list(Role).index(template.role) + n


def lease_of(n: int, template: Template = DECODE) -> str:
    """The lease (hex) of a worker that was made here and has registered."""
    return lease_hex(pid_of(n, template))


def worker(n: int, state: str, template: Template = DECODE, **more: Any) -> Worker:
    """One entry. `state` is `ready`, or `draining/restarting`: state and intent. Its GPUs are `on_ledger`'s to give.

    It is as the machine would have left it: one that drains was asked to, one that crashed is being cleared away.
    """
    kind, _, intent = state.partition("/")
    parsed = WorkerState(kind)
    traits = TRAITS[parsed]
    fields: dict[str, Any] = {"starts": 0 if parsed is WorkerState.PENDING else 1}
    if traits.process is HasProcess.YES:
        pid = pid_of(n, template)
        fields["process"] = Process(pid, float(pid), 0.0, 1.8e9)
        fields["served"] = parsed is not WorkerState.STARTING
    if traits.standby:
        fields["standby"] = Standby(wanted=parsed is not WorkerState.WAKING, order=1)
    if parsed in (WorkerState.READY, WorkerState.DRAINING, WorkerState.FLIPPING) or traits.standby:
        fields |= {"lease": lease_of(n, template), "ready_s": 0.0, "heard_s": 0.0}
    if parsed is WorkerState.FLIPPING:
        other = DECODE if template.role is Role.PREFILL else PREFILL
        fields["flip"] = FlipTarget(name(50 + n, other.component), other.component, 50 + n, asking=True)
    if parsed is WorkerState.DRAINING:
        fields |= {"requested_at_s": 0.0, "signalled": True}
    if parsed in DUE:
        fields["due_s"] = NOT_DUE_S
    if traits.process is HasProcess.ENDING or (parsed is WorkerState.EXITED and (n or intent)):
        fields["sweeping"] = True
    if parsed is WorkerState.EXITED and more.get("gpus"):
        fields |= {"sweeping": False, "gpus_pending_release": GpusPendingRelease(0.0)}
    entry = Worker(
        name(n, template.component), template.component, template.role, n, parsed, intent=Intent(intent or "steady")
    )
    return entry.changed(**{**fields, **more})


def fleet(*workers: str | Worker | None, gpus: int = 8, templates: tuple[Template, ...] = TEMPLATES) -> Fleet:
    """Decode workers from the bare one up (None leaves the name out), on a ledger of so many devices."""
    given = [worker(n, each) if isinstance(each, str) else each for n, each in enumerate(workers)]
    return on_ledger([each for each in given if each is not None], gpus, templates)


def on_ledger(workers: list[Worker], gpus: int, templates: tuple[Template, ...] = TEMPLATES) -> Fleet:
    """A fleet whose workers hold what their state says that they hold: those with a process, of any kind.

    A worker whose `gpus` are given (any names) holds as many instead.
    """
    ledger = GpuLedger.of(SimInventory(gpus).sample())
    size = {template.component: template.gpus_per_worker for template in templates}
    entries = {}
    for each in workers:
        has = TRAITS[each.state].process is not HasProcess.NO
        ledger = ledger.allocate(each.name, len(each.gpus) or (size[each.component] if has else 0))
        entries[each.name] = replace(each, gpus=ledger.held_uuids.get(each.name, ()))
        if TRAITS[each.state].asleep:
            sleeper = Sleeper(ledger.held_uuids.get(each.name, ()), RESIDUE_BYTES, RESIDUE_BYTES)
            ledger = ledger.fall_asleep(each.name, sleeper)
            entries[each.name] = replace(each, gpus=())
    waits = any(each.state is WorkerState.PENDING or each.ended.gpus_pending_release is not None for each in workers)
    return Fleet("dynamo", templates, entries, ledger, look_s=NOT_DUE_S if waits else None)


def put(view: Fleet, name: str, **changes: Any) -> Fleet:
    return view.with_workers({**view.workers, name: view.workers[name].changed(**changes)})


def load(tokens: int = 0, *, active: int = 0, hits: float = 0.0, itl_ms: float | None = 10.0, waiting: int = 0) -> Load:
    return Load(
        request_active_slots=active,
        request_total_slots=64,
        kv_active_blocks=active * 10,
        kv_total_blocks=1000,
        num_requests_waiting=waiting,
        gpu_prefix_cache_hit_rate=hits,
        remaining_tokens=tokens,
        itl_ms=itl_ms,
    )


def lower_names(view: Fleet, component: str, name: str) -> list[tuple[str, Worker | None]]:
    """The component's names below this one, each with its entry."""
    below = takewhile(lambda found: found[0] != name, view.names_from_lowest(component))
    return [(lower, entry) for lower, _, entry in below]


NO_LOAD = Missing("no answer")
