"""What a planner sees and what it says. Values only: the loop, the twin and the policies all speak in these."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.types import Load, Missing


@dataclass(frozen=True, slots=True)
class Reading:
    """One pull of the metrics. What could not be had, or is older than three pulls, is `Missing`: never 0.

    `queue` is the number of requests in the prefill queue that nobody has pulled yet; None where the graph has no
    prefill component. `loads` are those of the decode (or aggregated) workers that are ready, by watcher name.
    """

    at_s: float
    queue: int | Missing | None
    loads: Mapping[str, Load | Missing]


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one component, counted. `gpus_held` are all that its processes hold, leaving ones included.

    `ready` serve; `coming` will serve without anybody asking again (starting, backing off, called back), of these
    `waiting` have not got their GPUs yet; `leaving` still drain, of these `cancellable` can be taken back and
    `routed` are not yet out of routing. `added_at_s` is when the last one became ready or had its drain taken back
    (None: none since the planner began).
    """

    component: str
    gpus_per_worker: int
    ready: int
    coming: int = 0
    waiting: int = 0
    leaving: int = 0
    cancellable: int = 0
    routed: int = 0
    gpus_held: int = 0
    added_at_s: float | None = None

    @property
    def capacity(self) -> int:
        """Workers that serve or will: what a step is counted from (lesson 16)."""
        return self.ready + self.coming


@dataclass(frozen=True, slots=True)
class Fleet:
    """Both components that a load planner moves. `prefill` is None in an aggregated graph."""

    prefill: Pool | None
    decode: Pool


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
    taken to do otherwise (None where no single number would have)."""

    component: str
    step: int
    rule: Rule
    numbers: Mapping[str, float]
    otherwise: Counterfactual | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`targets` are the capacities wanted, by component; `reasons` has one entry for each component, in the order
    in which the steps are taken. The policy wants to be asked again at `next_tick_at`.
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
