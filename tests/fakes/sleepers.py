"""Fleets in which workers sleep, for tests of the machine: orders, what workers say, and one that has gone to sleep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import StandbyFacts
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, PREFILL, fleet, name, pid_of
from tests.fakes.arbiter.machine import Life

GIB = 1024**3
SLEEPERS = (replace(DECODE, standby=0), replace(PREFILL, standby=0), FRONTEND)


def sleep(n: int = 1, level: int = 1, *, force: bool = False) -> st.Sleep:
    return st.Sleep(stimulus_id="sleep:1", name=name(n), level=level, force=force)


def wake(n: int = 1) -> st.Wake:
    return st.Wake(stimulus_id="wake:1", name=name(n))


def scale(change: int, component: str = "VllmWorker", **more: Any) -> st.Scale:
    return st.Scale(stimulus_id="scale:1", component=component, target=Change(change, relative=True), **more)


def some(*states: str, gpus: int = 4, **changes: Any) -> Life:
    """Decode workers that may sleep."""
    templates = (replace(SLEEPERS[0], **changes), *SLEEPERS[1:])
    return Life(fleet(*states, gpus=gpus, templates=templates))


def told(life: Life, n: int = 1, **facts: Any) -> list[str]:
    """Its ready key, with what it says of its standby."""
    known = {"vram_bytes": GIB, "host_bytes": GIB, **facts}
    return life.registered(n, standby=StandbyFacts(**known))


def order(life: Life, n: int = 1) -> int:
    return life.worker(n).standby.order


def answered(life: Life, n: int = 1, **more: Any) -> list[str]:
    seen = {"name": name(n), "pid": pid_of(n), "order": order(life, n), **more}
    return life.feed(st.OrderAnswered(stimulus_id="control", **seen))


def asleep(*states: str, gpus: int = 4, **changes: Any) -> Life:
    life = some(*states, gpus=gpus, **changes)
    life.feed(sleep())
    told(life, order=order(life), asleep=True)
    life.gpus()
    return life
