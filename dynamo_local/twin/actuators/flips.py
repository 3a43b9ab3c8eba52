"""Role flips of the twin's workers, as those of the real ones: the process and its streams go on.

decode -> prefill: it pulls at once, beside its streams, and is out of decode routing with its new name. prefill ->
decode: it pulls nothing more, and is in decode routing with its new name.
"""

from __future__ import annotations

from dynamo_local.control.effects import Done
from dynamo_local.core.life.stimuli import FlipAnswered
from dynamo_local.core.types import Role, lease_hex
from dynamo_local.twin.agenda import Agenda, What
from dynamo_local.twin.process import Process


class Flips:
    """Those that are under way, by instance id."""

    def __init__(self, agenda: Agenda, flip_s: float) -> None:
        self._agenda = agenda
        self._flip_s = flip_s
        self._under_way: dict[int, tuple[str, str, Done]] = {}

    def begin(self, process: Process, to: str, now_s: float, done: Done) -> None:
        """It was told to become `to`; `done` hears of it when it has."""
        process.pulls = process.role is not Role.PREFILL
        self._under_way[process.instance_id] = (process.name, to, done)
        self._agenda.add(now_s + self._flip_s, What.FLIPPED, process.instance_id)

    def over(self, instance_id: int) -> None:
        """It is registered in its new role. Nothing for one that has ended meanwhile."""
        if (found := self._under_way.pop(instance_id, None)) is not None:
            name, to, done = found
            lease = lease_hex(instance_id)
            done(FlipAnswered(stimulus_id="flip", name=name, pid=instance_id, to=to, lease=lease))
