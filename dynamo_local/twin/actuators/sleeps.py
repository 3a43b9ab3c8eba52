"""Standby in the twin: a worker finishes its streams, sleeps, and wakes when it is told to, its prefix cache empty."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.life.standby import StandbyFacts
from dynamo_local.core.life.stimuli import KeyPut
from dynamo_local.core.types import lease_hex
from dynamo_local.twin.agenda import Agenda, What
from dynamo_local.twin.options import TwinOptions
from dynamo_local.twin.process import Process


@dataclass(slots=True)
class _Order:
    """The last one of a process. `due_s` is when it is carried out (None: its streams have not ended)."""

    number: int
    level: int
    asleep: bool
    due_s: float | None = None


class Sleeps:
    """The orders that processes were given, by instance id."""

    def __init__(self, options: TwinOptions, agenda: Agenda) -> None:
        self._agenda = agenda
        self._lead = options.lead
        self._residue_bytes = options.sim.sleep_residue_bytes
        self._host_bytes = options.sim.sleep_host_bytes
        self._orders: dict[int, _Order] = {}
        self._sleeping: set[int] = set()

    def begins_asleep(self, process: Process) -> None:
        """One that was put to sleep before the run began."""
        process.deregistered_s, process.resting = 0.0, True
        self._sleeping.add(process.instance_id)

    def sleep(self, process: Process, order: int, level: int, now_s: float) -> None:
        """It takes nothing new. Who was still being woken just goes on sleeping."""
        process.resting = True
        process.deregistered_s = now_s if process.deregistered_s is None else process.deregistered_s
        self._orders[process.instance_id] = _Order(order, level, asleep=True)
        if process.instance_id in self._sleeping:
            self.rests(process, now_s)

    def rests(self, process: Process, now_s: float) -> None:
        """Its streams have ended, and nothing comes any more."""
        order = self._orders.get(process.instance_id)
        if order is not None and order.asleep and order.due_s is None:
            self._due(process, order, now_s + self._lead.sleep_s)

    def wake(self, process: Process, order: int, now_s: float) -> None:
        """It serves when its engine is awake; at once where that never slept."""
        given = self._orders[process.instance_id] = _Order(order, 1, asleep=False)
        self._due(process, given, now_s + (self._lead.wake_s if process.instance_id in self._sleeping else 0.0))

    def _due(self, process: Process, order: _Order, at_s: float) -> None:
        order.due_s = at_s
        self._agenda.add(at_s, What.ORDERED, process.instance_id)

    def carried_out(self, process: Process, now_s: float) -> KeyPut | None:
        """What it says of itself then; None where another order has come since, or is not due yet."""
        number = process.instance_id
        order = self._orders.get(number)
        if order is None or order.due_s != now_s or process.asked_to_leave:
            return None
        if order.asleep:
            self._sleeping.add(number)
            process.scheduler.reset_prefix_cache(now_s)
            facts = StandbyFacts(
                order.number,
                asleep=True,
                level=order.level,
                vram_bytes=self._residue_bytes,
                host_bytes=self._host_bytes,
            )
        else:
            self._sleeping.discard(number)
            process.deregistered_s, process.resting = None, False
            facts = StandbyFacts(order.number)
        del self._orders[number]
        return KeyPut(stimulus_id="standby", name=process.name, pid=number, lease=lease_hex(number), standby=facts)
