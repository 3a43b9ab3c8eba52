"""What the load planner decides from, and any planner's decision with its reasons."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.planner.values.readings import Reading


@dataclass(frozen=True, slots=True)
class Observation:
    """All that one decision is made from: the readings of one interval, and the pools at its end."""

    now_s: float
    interval_began_s: float
    readings: tuple[Reading, ...]
    pools: WorkerPools


class Rule(enum.StrEnum):
    """Which rule of the load planner decided about a component. Other policies have names of their own."""

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
    """An up that was decided earlier, whose GPU is free now."""
    OVERRIDDEN = "overridden"
    """A plugin wanted another number than the policy."""


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

    `rule` is a `Rule`, or the name that another policy has for its own; `why` is that policy's sentence with the
    numbers in it (empty: `explain` finds the words).

    `deferred`: the step is planned and not carried out now. An up waits until the GPU of this decision's down is
    really free; a down takes such an up back before anything was started.

    `decisions` has what each loop of a policy with several of them decided, by the name of Dynamo's enum
    (`load_scaling_decision`, `throughput_scaling_decision`).
    """

    component: str
    step: int
    rule: str
    numbers: Mapping[str, float]
    otherwise: Counterfactual | None = None
    deferred: bool = False
    why: str = ""
    decisions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """`targets` are the capacities wanted, by component; `reasons` has one entry for each component, in the order
    in which the steps are taken. `acts` are to be carried out now; the policy wants to be asked again at
    `next_tick_at`.

    The targets are carried out together or not at all, unless the steps stand `apart`: then one that is refused costs
    the others nothing.
    """

    now_s: float
    targets: Mapping[str, int]
    reasons: tuple[Reason, ...]
    next_tick_at: float
    notes: tuple[str, ...] = field(default=())
    apart: bool = False

    @property
    def steps(self) -> dict[str, int]:
        """How many more (or, negative, fewer) by component."""
        return {reason.component: reason.step for reason in self.reasons}

    @property
    def acts(self) -> tuple[tuple[str, int], ...]:
        """`(component, step)`, in order: what to carry out now."""
        return tuple((reason.component, reason.step) for reason in self.reasons if reason.step and not reason.deferred)
