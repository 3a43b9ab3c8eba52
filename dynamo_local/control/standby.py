"""Standby, as it travels: what workers say in their ready keys, and what the statefile keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

from dynamo_local.core.gpu_residue import Sleeper
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.life.standby import Standby, StandbyFacts
from dynamo_local.core.types import Missing
from dynamo_local.state import StandbyEntry, State

log = logging.getLogger(__name__)

UNKNOWN = Missing("the worker could not measure it")


def facts_of(told: Any) -> StandbyFacts | None:
    """`standby` of a ready key; None where the worker says nothing, or nothing that can be understood."""
    if not isinstance(told, dict):
        return None
    try:
        return StandbyFacts(
            order=int(told.get("order", 0)),
            asleep=bool(told.get("asleep")),
            level=int(told.get("level", 1)),
            cannot=_text(told.get("cannot")),
            vram_bytes=_bytes(told.get("vram_bytes")),
            host_bytes=_bytes(told.get("host_bytes")),
            rehearsed_bytes=_bytes(told.get("rehearsed_bytes")),
            pids=frozenset(int(pid) for pid in told.get("pids", ())),
            recycle=_text(told.get("recycle")),
        )
    except (TypeError, ValueError) as error:
        log.warning("what a worker says of its standby cannot be understood: %s", error)
        return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _bytes(value: Any) -> int | Missing:
    return UNKNOWN if value is None else int(value)


def _or_none(value: int | Missing) -> int | None:
    return None if isinstance(value, Missing) else value


def entry_of_standby(worker: Worker, fleet: Fleet) -> StandbyEntry | None:
    """What the statefile keeps; None of a worker that has nothing to do with it."""
    standby, sleeper = worker.standby, fleet.gpus.sleepers.get(worker.name)
    if sleeper is None and not standby.wanted and not standby.order:
        return None
    entry = StandbyEntry(wanted=standby.wanted, order=standby.order, level=standby.level, drained=standby.drained)
    if sleeper is not None:
        entry.gpu_uuids, entry.pids = list(sleeper.uuids), sorted(sleeper.pids)
        entry.vram_bytes, entry.host_bytes = _or_none(sleeper.vram_bytes), _or_none(sleeper.host_bytes)
    return entry


def standby_of_entry(entry: StandbyEntry | None) -> Standby:
    """What `entry_of_standby` kept of the worker's record."""
    if entry is None:
        return Standby()
    return Standby(wanted=entry.wanted, order=entry.order, level=entry.level, drained=entry.drained)


def sleeper_of_entry(entry: StandbyEntry | None) -> Sleeper | None:
    """What it kept of the devices; None of a worker that did not sleep."""
    if entry is None or entry.gpu_uuids is None:
        return None
    vram, host = _bytes(entry.vram_bytes), _bytes(entry.host_bytes)
    return Sleeper(tuple(entry.gpu_uuids), vram, host, frozenset(entry.pids))


def with_sleepers(ledger: GpuLedger, state: State, running: Container[str]) -> GpuLedger:
    """The ledger that knows what those of a run keep that sleep, and still run; they hold their devices' locks."""
    for name, entry in state.components.items():
        sleeper = sleeper_of_entry(entry.standby)
        if sleeper is not None and name in running:
            ledger = ledger.fall_asleep(name, sleeper)
    return ledger
