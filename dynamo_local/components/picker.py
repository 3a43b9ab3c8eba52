"""The pickers by name: those of `core.routing`, and one that leaves it to chance (the core knows no `random`)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from dynamo_local.core.routing import LeastLoaded, Picker, RoundRobin, Sample

PickerName = Literal["round-robin", "random", "least-loaded"]


class Random:
    """Uniform; the generator is given, so that a seed repeats the choices."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[int], loads: Mapping[int, Sample]) -> int:
        return self._rng.choice(sorted(candidates))

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float) -> None:
        """Chance does not depend on load."""

    def finished(self, instance_id: int, request_id: str) -> None:
        """Chance does not depend on load."""


def make_picker(name: PickerName, seed: int | None = None) -> Picker:
    """The picker of that name; `seed` is used by `random` only."""
    if name == "random":
        return Random(random.Random(seed))
    return LeastLoaded() if name == "least-loaded" else RoundRobin()
