"""What the throughput-load policy remembers between ticks: an immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_local.planner.models.pass_model import Kind, PassModel
from dynamo_local.planner.policies.throughput_load.engines import EngineWatch
from dynamo_local.planner.policies.throughput_load.options import Mode, ThroughputLoadOptions
from dynamo_local.planner.policies.throughput_load.signals import NO_SIGNALS, Signals
from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.passes import Capabilities, EngineId, ForwardPass
from dynamo_local.planner.values.pools import Pool, WorkerPools
from dynamo_local.planner.values.readings import Reading
from dynamo_local.planner.values.scaling import LoadScaling, ThroughputScaling
from dynamo_local.planner.values.series import Series


class Role(NamedTuple):
    """One component that is planned. `name` is `prefill` or `decode` (an aggregated graph's workers, too); `floor` its
    fewest replicas."""

    name: str
    kind: Kind
    pool: Pool
    floor: int


def roles_of(pools: WorkerPools, options: ThroughputLoadOptions) -> tuple[Role, ...]:
    """The roles that are planned, prefill first."""
    mode = options.mode or (Mode.AGG if pools.prefill is None else Mode.DISAGG)
    if mode is Mode.AGG:
        return (Role("decode", Kind.AGG, pools.decode, options.min_endpoint),)
    roles = []
    if mode is not Mode.DECODE and pools.prefill is not None:
        roles.append(Role("prefill", Kind.PREFILL, pools.prefill, options.floor("prefill")))
    if mode is not Mode.PREFILL:
        roles.append(Role("decode", Kind.DECODE, pools.decode, options.floor("decode")))
    return tuple(roles)


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """What the load loop found for one role. `wanted` None: it has no opinion. `numbers`: what else it looked at."""

    rule: LoadScaling
    wanted: int | None = None
    signals: Signals = NO_SIGNALS
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ThroughputVerdict:
    """What the throughput loop found for one role. `engine_rps`: requests per second of a worker within the targets
    (`within`: they can be kept at all); `replicas` those that the prediction needs, before jump and budget; `bound`
    after them (None: the one before stands)."""

    rule: ThroughputScaling
    bound: int | None = None
    replicas: int | None = None
    engine_rps: float | None = None
    predicted_rps: float | None = None
    within: bool = True


class Cancel(NamedTuple):
    """A reduction that was wanted while workers start: of which inventory, to what, since when."""

    inventory: tuple[tuple[str, int, int], ...]
    targets: tuple[tuple[str, int], ...]
    at_s: float


class SharedQueue(NamedTuple):
    """Prompts that wait in a queue of the graph, which prefill workers pull from when they are free: those in it now
    (None: there is no such queue, or it is not `known`), and the most since the load loop's last decision."""

    now: float | None = None
    most: float = 0.0
    known: bool = True


NO_QUEUE = SharedQueue()


@dataclass(frozen=True, slots=True)
class ScalingState:
    """`began_s` is the zero of both loops' grids, `seen_s` the last pull; `series` are the windows of traffic so far.

    `bounds` are the throughput loop's: lower bounds where the load loop runs, too, else targets; a role without one has
    only its floor. `starved`: a throughput decision could not be carried out while workers start. `asked`: what its own
    proposals of this tick want, by role. `planned`: the
    component of each kind. `benchmarks`: the workers' own that models have begun with, or could not.
    `decided_from`: when the interval of the last decision began, and its reading.
    """

    began_s: float
    seen_s: float
    series: Series
    load_due: bool = False
    throughput_due: bool = False
    models: Mapping[Kind, PassModel] = field(default_factory=dict)
    benchmarks: Mapping[Kind, tuple[ForwardPass, ...]] = field(default_factory=dict)
    planned: Mapping[Kind, str] = field(default_factory=dict)
    watches: Mapping[EngineId, EngineWatch] = field(default_factory=dict)
    watched_since_s: float = 0.0
    queue: SharedQueue = NO_QUEUE
    told: Mapping[str, Capabilities] = field(default_factory=dict)
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    prediction: Prediction | None = None
    why_not_predicted: ThroughputScaling | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)
    starved: bool = False
    cancel: Cancel | None = None
    asked: Mapping[str, int] = field(default_factory=dict)
    cancelling: bool = False
    load: Mapping[str, LoadVerdict] = field(default_factory=dict)
    throughput: Mapping[str, ThroughputVerdict] = field(default_factory=dict)
    decided_from: tuple[float, tuple[Reading, ...]] = (0.0, ())
