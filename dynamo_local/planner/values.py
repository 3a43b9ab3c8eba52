"""What a planner sees and what it says. Values only: the loop, the twin and the policies all speak in these."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.types import Load, Missing

UNIT_BITS = 1074
"""The smallest float is 2**-1074."""


@dataclass(frozen=True, slots=True)
class KvSum:
    """The sum of `gpu_cache_usage_perc` over `count` samples, without any rounding: `units` of 2**-1074.

    Every float is a whole number of such units. With rounded sums a mean of equal samples is not always that sample,
    and a threshold would be missed by a hair. `waiting` is the sum of `num_requests_waiting` of the same samples.
    """

    units: int = 0
    waiting: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One pull of the metrics. What could not be had, or is older than three pulls, is `Missing`: never 0.

    `queue` is the number of requests in the prefill queue that nobody has pulled yet; None where the graph has no
    prefill component. `loads` are those of the decode (or aggregated) workers that are ready, by watcher name.
    `kv` is summed once, here: a decision over many readings of many workers stays cheap. A load that is no finite
    number is no sample.
    """

    at_s: float
    queue: float | Missing | None
    loads: Mapping[str, Load | Missing]
    kv: KvSum = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        units = waiting = count = 0
        for load in self.loads.values():
            if isinstance(load, Missing) or not math.isfinite(load.gpu_cache_usage_perc):
                continue
            over, under = load.gpu_cache_usage_perc.as_integer_ratio()  # `under` is a power of 2
            units += over << (UNIT_BITS + 1 - under.bit_length())
            waiting += load.num_requests_waiting
            count += 1
        object.__setattr__(self, "kv", KvSum(units, waiting, count))


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one component, counted.

    `ready` serve. `coming` will serve without anybody asking again: some start or are called back, and of these
    others are `waiting`: for GPUs, or for the end of a back-off. `deferred` of the waiting ones (0 or 1) are no more
    than the planner's own word: it was decided, and is carried out when another worker's GPU is really free.
    `leaving` still drain, of these `cancellable` can be taken back and `routed` are not yet out of routing.

    `gpus_held` are all that its processes hold, those of leaving ones (`gpus_leaving`) included; `gpus_lacking` are
    those that waiting workers (not the deferred one) have not got yet and will take. `added_at_s` is when the last of
    those that serve became ready or had its drain taken back (None: none serves).
    """

    component: str
    gpus_per_worker: int
    ready: int
    coming: int = 0
    waiting: int = 0
    deferred: int = 0
    leaving: int = 0
    cancellable: int = 0
    routed: int = 0
    gpus_held: int = 0
    gpus_leaving: int = 0
    gpus_lacking: int = 0
    added_at_s: float | None = None

    @property
    def capacity(self) -> int:
        """Workers that serve or will: what a step is counted from (lesson 16)."""
        return self.ready + self.coming

    @property
    def adjusting(self) -> bool:
        """A worker starts or is called back, or a drain is not yet out of routing (rule 2)."""
        return self.coming > self.waiting or self.routed > 0

    @property
    def gpus_spoken_for(self) -> int:
        """Held, or needed by a worker that waits: what counts against the budget."""
        return self.gpus_held + self.gpus_lacking


@dataclass(frozen=True, slots=True)
class Fleet:
    """Both components that a load planner moves. `prefill` is None in an aggregated graph.

    `pending`: a decision is with somebody else, who has not said yet that it is carried out.
    """

    prefill: Pool | None
    decode: Pool
    pending: bool = False

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Prefill first, where there is one."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def adjusting(self) -> bool:
        """An adjustment is under way, whoever began it."""
        return self.pending or any(pool.adjusting for pool in self.pools)

    @property
    def gpus_spoken_for(self) -> int:
        """What counts against `max_gpu_budget`."""
        return sum(pool.gpus_spoken_for for pool in self.pools)


@dataclass(frozen=True, slots=True)
class Observation:
    """All that one decision is made from: the readings of one interval, and the fleet at its end."""

    now_s: float
    interval_began_s: float
    readings: tuple[Reading, ...]
    fleet: Fleet


class Rule(enum.StrEnum):
    """Which rule of planner-rules decided about a component."""

    MISSING = "missing"
    ADJUSTING = "adjusting"
    BELOW_FLOOR = "below_floor"
    SCALE_DOWN = "scale_down"
    SCALE_UP = "scale_up"
    TAKE_BACK = "take_back"
    FLOOR = "floor"
    GRACE = "grace"
    BUDGET = "budget"
    QUEUE_EMPTYING = "queue_emptying"
    COMING = "coming"
    WITHIN = "within"
    GPU_FREED = "gpu_freed"
    """Not decided now: an up that was decided earlier, whose GPU is free at last."""


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """The nearest change of one number that would have decided otherwise: `name` from `value` to `needed` gives
    `step`."""

    name: str
    value: float
    needed: float
    step: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a component's step is what it is: the rule that decided, the numbers it compared, and what it would have
    taken to do otherwise (None where no single number would have).

    `deferred`: the step is planned and not carried out now. An up waits until the GPU of this decision's down is
    really free; a down takes such an up back before anything was started.
    """

    component: str
    step: int
    rule: Rule
    numbers: Mapping[str, float]
    otherwise: Counterfactual | None = None
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """`targets` are the capacities wanted, by component; `reasons` has one entry for each component, in the order
    in which the steps are taken. `acts` are to be carried out now; the policy wants to be asked again at
    `next_tick_at`.
    """

    now_s: float
    targets: Mapping[str, int]
    reasons: tuple[Reason, ...]
    next_tick_at: float
    notes: tuple[str, ...] = field(default=())

    @property
    def steps(self) -> dict[str, int]:
        """-1, 0 or +1 by component."""
        return {reason.component: reason.step for reason in self.reasons}

    @property
    def acts(self) -> tuple[tuple[str, int], ...]:
        """`(component, -1 or +1)`, in order: what to carry out now."""
        return tuple((reason.component, reason.step) for reason in self.reasons if reason.step and not reason.deferred)
