"""The pickers by name: those of `core.routing`, and one that leaves it to chance (the core knows no `random`)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from dynamo_local.core.kv_routing import KvCost
from dynamo_local.core.routing import NO_HITS, LeastLoaded, Picker, RoundRobin, RouterPolicy, Sample


class Random:
    """Uniform; the generator is given, so that a seed repeats the choices."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[int], loads: Mapping[int, Sample], hits: Mapping[int, float] = NO_HITS) -> int:
        return self._rng.choice(sorted(candidates))

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float) -> None:
        """Chance does not depend on load."""

    def finished(self, instance_id: int, request_id: str) -> None:
        """Chance does not depend on load."""


def make_picker(name: RouterPolicy, seed: int | None = None) -> Picker:
    """The picker of that name; `seed` is for `random`, and for the ties of `kv` and `kv-load`."""
    if name == "random":
        return Random(random.Random(seed))
    if name in ("kv", "kv-load"):
        return KvCost(random.Random(seed).choice, prefix=name == "kv")
    return LeastLoaded() if name == "least-loaded" else RoundRobin()
