"""Fleets as values, in a line each: `fleet("ready", "draining@3")` is the bare worker and `_1`."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

from dynamo_local.core.fleet_view import Course, FleetView, Template, WorkerView
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import Load, Missing, Role, WorkerState, watcher_name
from dynamo_local.serve.inventory import SimInventory

DECODE = Template("VllmWorker", Role.DECODE, gpus_per_worker=1)
PREFILL = Template("PrefillWorker", Role.PREFILL, gpus_per_worker=1)
FRONTEND = Template("Frontend", Role.FRONTEND, max_workers=1)
TEMPLATES = (DECODE, PREFILL, FRONTEND)

HOLDS_GPUS = {
    WorkerState.STARTING,
    WorkerState.READY,
    WorkerState.DRAINING,
    WorkerState.DRAIN_TIMED_OUT,
}


def name(n: int = 0, component: str = "VllmWorker") -> str:
    """`dynamo_VllmWorker_2`"""
    return watcher_name("dynamo", component, n)


def worker(n: int, state: str, template: Template = DECODE, **more: Any) -> WorkerView:
    """One entry. `state` is `ready`, or `draining/restarting`: state and course; it holds no GPU unless told."""
    kind, _, course = state.partition("/")
    parsed = WorkerState(kind)
    served = parsed in (WorkerState.READY, WorkerState.DRAINING)
    view = WorkerView(
        name(n, template.component),
        template.component,
        template.role,
        n,
        parsed,
        course=Course(course or "steady"),
        served=served,
    )
    return replace(view, **more)


def fleet(*workers: str | WorkerView | None, gpus: int = 8, templates: tuple[Template, ...] = TEMPLATES) -> FleetView:
    """Decode workers from the bare one up (None leaves the name out), on a ledger of so many devices."""
    given = [worker(n, each) if isinstance(each, str) else each for n, each in enumerate(workers)]
    return on_ledger([each for each in given if each is not None], gpus, templates)


def on_ledger(workers: list[WorkerView], gpus: int, templates: tuple[Template, ...] = TEMPLATES) -> FleetView:
    """A view whose workers hold what their state says they hold."""
    ledger = GpuLedger(SimInventory(gpus).sample())
    size = {template.component: template.gpus_per_worker for template in templates}
    holding = []
    for each in workers:
        wants = size[each.component] if each.state in HOLDS_GPUS else len(each.gpus)
        devices = ledger.allocate(each.name, wants)
        holding.append(replace(each, gpus=tuple(device.uuid for device in devices)))
    return FleetView("dynamo", templates, tuple(holding), ledger.snapshot())


def load(tokens: int = 0, *, active: int = 0, hits: float = 0.0, itl_ms: float | None = 10.0, waiting: int = 0) -> Load:
    """What a worker published."""
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


def lower_names(view: FleetView, component: str, name: str) -> list[tuple[str, WorkerView | None]]:
    """The component's names below this one, each with its entry."""
    below = takewhile(lambda found: found[0] != name, view.names_from_lowest(component))
    return [(lower, entry) for lower, _, entry in below]


NO_LOAD = Missing("no answer")
