"""What may be wrong with a GPU, and make its passes longer than its profile says: for tests of who notices. Pure, but
for the one function that looks at which GPU this process has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_local.core.gpus import simulated_uuid
from dynamo_local.engines.sim.options import SimOptions


@dataclass(frozen=True, slots=True)
class Faults:
    """`slow`: every pass takes so many times as long. `neighbour_factor`: that many times for the first
    `neighbour_for_s` of every `neighbour_every_s`. `drift_per_s`: so much longer, as a share, with each second.
    All seconds are real ones, since `began_s` of the engine's clock."""

    began_s: float
    slow: float = 1.0
    neighbour_every_s: float = 0.0
    neighbour_for_s: float = 0.0
    neighbour_factor: float = 1.0
    drift_per_s: float = 0.0

    def factor(self, at_s: float) -> float:
        """So many times as long takes a pass that begins at that moment."""
        since_s = max(0.0, at_s - self.began_s)
        factor = self.slow * (1.0 + self.drift_per_s * since_s)
        if self.neighbour_every_s and since_s % self.neighbour_every_s < self.neighbour_for_s:
            factor *= self.neighbour_factor
        return factor


def faults_here(options: SimOptions, began_s: float, environ: Mapping[str, str] | None = None) -> Faults | None:
    """Those of the engine in this process, whose GPUs `CUDA_VISIBLE_DEVICES` names; None: nothing is wrong."""
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "").split(",")
    slow = options.slow_gpu is not None and simulated_uuid(options.slow_gpu) in visible
    if not slow and not options.neighbour_every_s and not options.drift_per_s:
        return None
    return Faults(
        began_s,
        options.slow_factor if slow else 1.0,
        options.neighbour_every_s,
        options.neighbour_for_s,
        options.neighbour_factor,
        options.drift_per_s,
    )
