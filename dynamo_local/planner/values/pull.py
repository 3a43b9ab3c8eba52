"""All that a planner is shown at once, and what it wants to be shown next time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.passes import Capabilities, Engines
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.planner.values.readings import Reading
from dynamo_local.planner.values.requests import Requests
from dynamo_local.planner.values.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Wants:
    """What the next pull must bring, beside the loads. `traffic_window_s`: the length of the window of `Pull.traffic`,
    None for none. `requests`: those of that window one by one."""

    traffic_window_s: float | None = None
    passes: bool = False
    requests: bool = False


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull: the workers always, the rest as far as it was wanted (None: not asked) and known (else `Missing`).

    `reading` has the moment of the pull, the prefill queue and the loads. `engines` holds one entry for each rank of
    each ready worker. `capabilities` is by component. `blind` says why the workers cannot be observed now (None: they
    can). `requests` are those of the traffic's window; None also where they are only counted together.
    """

    reading: Reading
    pools: WorkerPools
    traffic: Traffic | Missing | None = None
    engines: Engines = field(default_factory=dict)
    capabilities: Mapping[str, Capabilities] = field(default_factory=dict)
    blind: str | None = None
    requests: Requests | None = None

    @property
    def at_s(self) -> float:
        """When it was pulled, planner's clock, seconds."""
        return self.reading.at_s
