"""The pickers by name: those of `core.routing`, and a random one (the core does not use `random`)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from dynamo_local.clock import Clock
from dynamo_local.core.dispatch.picking import SloPicker
from dynamo_local.core.dispatch.targets import Costs, Targets, Timing
from dynamo_local.core.kv.routing import KvCost
from dynamo_local.core.routing import NO_HITS, LeastLoaded, Picker, RoundRobin, RouterPolicy, Sample
from dynamo_local.core.types import Missing
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.profiles import ProfileModel
from dynamo_local.runtime.load import LoadView


class Random:
    """Uniform; the generator is given, so that a seed repeats the choices."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        return self._rng.choice(sorted(candidates))

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        """Chance does not depend on load."""

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        """Chance does not depend on load."""


def make_picker(
    name: RouterPolicy, seed: int | None = None, *, hears_ends: bool = True, costs: Costs | None = None
) -> Picker:
    """The picker of that name; `seed` is for `random`, and for the ties of `kv` and `kv-load`. `hears_ends`: whether it
    is told when a request has ended, as soon as that is so. `slo` without `costs` is `least-loaded`."""
    if name == "slo" and costs is not None:
        return SloPicker(costs.timing, costs.targets, hears_ends=hears_ends)
    if name == "random":
        return Random(random.Random(seed))
    if name in ("kv", "kv-load"):
        return KvCost(random.Random(seed).choice, prefix=name == "kv")
    return RoundRobin() if name == "round-robin" else LeastLoaded(hears_ends=hears_ends)


def sim_picker(name: RouterPolicy, seed: int | None, sim: SimOptions, targets: Targets) -> Picker:
    """The picker of that name for engines that are simulated so: `slo` decides by their profile. Raises `ConfigError`
    for one that cannot be read."""
    costs = Costs(Timing(ProfileModel.load(sim.profile), sim.speed), targets) if name == "slo" else None
    return make_picker(name, seed, costs=costs)


def samples(view: LoadView, clock: Clock, instance_ids: Sequence[int]) -> dict[int, Sample]:
    """The view's loads as samples for the pickers; a missing one stays missing."""
    now_s = clock.now_s()
    found: dict[int, Sample] = {}
    for instance_id in instance_ids:
        report = view.get(instance_id)
        if isinstance(report, Missing):
            found[instance_id] = Sample(report, now_s)
        else:
            found[instance_id] = Sample(report.load, now_s - report.age_s)
    return found
