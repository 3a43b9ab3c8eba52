"""The values of planners: observations, predictions, proposals, and decisions with their reasons."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Load, Missing

# --- forecasts
# The forecast of the next window, and its task.


@dataclass(frozen=True, slots=True)
class Prediction:
    """The next window: requests, mean prompt and answer lengths (tokens), KV hit rate, accept length.

    None: nobody has an opinion (a field of Dynamo's `PredictionData` that is not set). `source` names who said it.
    """

    num_req: float | None = None
    isl: float | None = None
    osl: float | None = None
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class ForecastTask:
    """Series to be continued by `steps` windows each, off the arbiter's loop. Plain numbers, so that it can be sent to
    another process. `predictor` is its name (constant, arima, …), `options` are its own."""

    predictor: str
    series: tuple[tuple[float, ...], ...]
    steps: int = 1
    window_s: float = 180.0
    options: tuple[tuple[str, float | str | bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The answer: for each series its next `steps` values, or why there are none. `notes` says of each fit that failed
    why it did, and what stands in its place."""

    values: tuple[tuple[float, ...] | Missing, ...]
    notes: tuple[str, ...] = ()


# --- passes
# The engines as a planner knows them: their passes (`core.passes`), and their limits.


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits of a component's engines, from their registration; None: unknown. `benchmark` are the passes that one of
    them measured of itself at its start, or why there are none."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_kv_tokens: int | None = None
    context_length: int | None = None
    dp_size: int = 1
    benchmark: tuple[ForwardPass, ...] | Missing | None = None


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """One engine as the planner knows it. `passes` came since the last observation, oldest first, without heartbeats.
    `last` is the last pass of all, heartbeats included, or the reason why nothing is known of the engine now."""

    component: str
    passes: tuple[ForwardPass, ...] = ()
    last: ForwardPass | Missing = field(default_factory=lambda: Missing("it has published no pass yet"))


Engines = Mapping[EngineId, EngineSeen]


# --- pools
# The workers that a planner moves, counted.


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one component, in counts, GPUs and times."""

    component: str
    gpus_per_worker: int
    # --- workers
    ready: int
    """They serve."""
    coming: int = 0
    """They will serve without another decision: they start, or a drain is being cancelled."""
    waiting: int = 0
    """Those of `coming` that wait for GPUs, or for the end of a back-off."""
    deferred: int = 0
    """Those of `waiting` (0 or 1) that the planner has decided and carries out when another worker's GPU is free."""
    leaving: int = 0
    """They drain."""
    cancellable: int = 0
    """Those of `leaving` whose drain can be cancelled."""
    routed: int = 0
    """Those of `leaving` that the Router still chooses."""
    # --- GPUs
    gpus_held: int = 0
    """GPUs of all processes, those of leaving workers included."""
    gpus_leaving: int = 0
    """GPUs of leaving workers."""
    gpus_lacking: int = 0
    """GPUs that waiting workers (not the deferred one) will take."""
    # --- times
    added_at_s: float | None = None
    """When the last serving worker became ready, or its drain was cancelled (None: none serves)."""
    coming_since_s: float | None = None
    """When the first coming worker entered its present state (None: none comes)."""
    leaving_since_s: float | None = None
    """When the first leaving worker began to leave (None: none leaves)."""
    start_up_s: float | None = None
    """Median of the last starts; before the first one, of earlier runs on this host (None: unknown)."""
    drain_s: float | None = None
    """Median of the last drains (None: unknown)."""
    # --- ways that are quicker than a start; 0 also if the planner may not use them
    flippable: int = 0
    """Ready workers that could take over the role of the other component now."""
    asleep: int = 0
    """Workers that could be woken, without those that are started to sleep."""
    lead_times: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Median seconds of each way to one more worker (`core.lead_times.OptionKind`), as far as it was measured."""

    @property
    def capacity(self) -> int:
        """Workers that serve or will: what a step is counted from."""
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
class WorkerPools:
    """Both components that a planner moves. `prefill` is None in an aggregated graph.

    `pending`: another environment has yet to acknowledge a decision.
    """

    prefill: Pool | None
    decode: Pool
    pending: bool = False

    @property
    def all(self) -> tuple[Pool, ...]:
        """Prefill first, where there is one."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def by_role(self) -> dict[str, Pool]:
        """As plugins name the components: "prefill", where there is one, and "decode" (of an aggregated graph too)."""
        prefill = {} if self.prefill is None else {"prefill": self.prefill}
        return {**prefill, "decode": self.decode}

    @property
    def gpus(self) -> tuple[int, int]:
        """GPUs of a prefill worker (0: the graph is aggregated) and of a decode worker."""
        prefill = 0 if self.prefill is None else max(1, self.prefill.gpus_per_worker)
        return prefill, max(1, self.decode.gpus_per_worker)

    @property
    def gpus_held(self) -> int:
        """GPUs of all processes of both components."""
        return sum(pool.gpus_held for pool in self.all)

    @property
    def adjusting(self) -> bool:
        """Whether an adjustment is under way, by the planner or a person."""
        return self.pending or any(pool.adjusting for pool in self.all)

    @property
    def gpus_spoken_for(self) -> int:
        """The GPUs that count against `max_gpu_budget`."""
        return sum(pool.gpus_spoken_for for pool in self.all)


# --- proposals
# The proposals of the pipeline's stages, under the names of `dynamo.planner.plugin.v1`.


class OverrideType(enum.IntEnum):
    """How a target is meant. The numbers are those of the wire."""

    SET = 0
    AT_LEAST = 1
    AT_MOST = 2


@dataclass(frozen=True, slots=True)
class ComponentTarget:
    """So many replicas of a role ("prefill" or "decode"; an aggregated graph's workers are "decode")."""

    sub_component_type: str
    replicas: int
    type: OverrideType = OverrideType.SET


@dataclass(frozen=True, slots=True)
class Accept:
    """No opinion."""


@dataclass(frozen=True, slots=True)
class Override:
    """These targets. `final`: nobody with a higher number is heard after it."""

    targets: tuple[ComponentTarget, ...]
    reason: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """Nothing is to be changed in this tick."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The answer of one plugin in one stage. The smaller `priority` wins."""

    plugin_id: str
    priority: int
    result: Accept | Override | Reject


# --- readings
# One observation of the load planner's metrics, and sums without rounding.


def exact_sum(values: Sequence[float | Fraction]) -> Fraction:
    """The sum, without any rounding, of finite floats and of sums of such.

    With rounded sums a mean of equal samples is not always that sample, and could miss a threshold by a rounding error.
    """
    # The largest denominator is a common one, because the denominators of floats are powers of 2. Adding 64 fractions
    # one by one took six times as long.
    ratios = [value.as_integer_ratio() for value in values]
    common = max((under for _, under in ratios), default=1)
    return Fraction(sum(over * (common // under) for over, under in ratios), common)


@dataclass(frozen=True, slots=True)
class KvUsageSum:
    """The exact sum of `gpu_cache_usage_perc` over `count` samples; `waiting` is the sum of `num_requests_waiting` of
    the same samples."""

    usage: Fraction = Fraction()
    waiting: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One observation of the metrics. A value that was not obtained, or is older than three pulls, is `Missing`: never
    0.

    `queue` is the number of requests in the prefill queue that nobody has pulled yet; None where the graph has no
    prefill component. `loads` are those of the decode (or aggregated) workers that are ready, by watcher name.
    `kv` is summed once, here: a decision over many readings of many workers stays cheap. A load whose KV use is
    `Missing` is no sample.
    """

    at_s: float
    queue: float | Missing | None
    loads: Mapping[str, Load | Missing]
    kv: KvUsageSum = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usages: list[float] = []
        waiting = 0
        for load in self.loads.values():
            if isinstance(load, Missing) or isinstance(load.gpu_cache_usage_perc, Missing):
                continue
            usages.append(load.gpu_cache_usage_perc)
            waiting += load.num_requests_waiting
        object.__setattr__(self, "kv", KvUsageSum(exact_sum(usages), waiting, len(usages)))


@dataclass(frozen=True, slots=True)
class IntervalObservation:
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


ROUNDINGS = 64
"""A formula's result is at most so many representable numbers away from the exact one."""


def boundary(near: float, holds: Callable[[float], bool]) -> tuple[float, float]:
    """Neighbours among floats: the greatest for which `holds`, and the next one. `near` is at most `ROUNDINGS` away.

    Further away, the result is no boundary. The search is never longer.
    """
    for _ in range(ROUNDINGS):
        if holds(near):
            break
        near = math.nextafter(near, -math.inf)
    above = math.nextafter(near, math.inf)
    for _ in range(ROUNDINGS):
        if not holds(above):
            break
        near, above = above, math.nextafter(above, math.inf)
    return near, above


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
    """The reason of a component's step: the rule and the numbers that it compared. `otherwise` is the nearest change of
    one number that would have changed the step (None: no single number would).

    `rule` is a `Rule`, or another policy's own name. `why` is that policy's sentence with its numbers (empty: `explain`
    writes the sentence).

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


# --- requests
# Requests one by one, for policies to which means say too little.


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was answered at `at_s` (planner's clock): its tokens, and its latencies in seconds (None: not
    known). `itl_s` is the mean gap between its own tokens."""

    at_s: float
    isl: int
    osl: int
    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def lasted_s(self) -> float:
        """From its arrival to its end, as far as that is known."""
        return (self.ttft_s or 0.0) + (self.itl_s or 0.0) * max(0, self.osl - 1)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of the clients from `since_s` to `at_s` (planner's clock, seconds): when requests began (ascending),
    and those that ended. Beginnings and ends are of different requests."""

    since_s: float
    at_s: float
    began: tuple[float, ...] = ()
    ended: tuple[Ended, ...] = ()


# --- scaling
# Why the throughput loop and the load loop decided as they did, under the names of Dynamo's enums.


class LoadScaling(enum.StrEnum):
    """`load_scaling_decision`, of all roles or of one."""

    UNSET = "unset"
    DISABLED = "disabled"
    NO_FPM_DATA = "no_fpm_data"
    SCALING_IN_PROGRESS = "scaling_in_progress"
    WORKER_COUNT_MISMATCH = "worker_count_mismatch"
    INSUFFICIENT_DATA = "insufficient_data"
    PARTNER_NOT_READY = "partner_not_ready"
    """The other role of a disaggregated graph cannot be judged, so that this one holds, too."""
    NO_CHANGE = "no_change"
    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    SCALE_DOWN_CAPPED_BY_THROUGHPUT = "scale_down_capped_by_throughput"
    SCALE_DOWN_REFUSED_CONSOLIDATION = "scale_down_refused_consolidation"
    """The load is low. On one engine less the load would not be low."""
    GPU_BUDGET_GUARD_HOLD = "gpu_budget_guard_hold"
    GPU_BUDGET_RECONCILE = "gpu_budget_reconcile"
    OVERRIDE_BY_USER_PLUGIN = "override_by_user_plugin"


class ThroughputScaling(enum.StrEnum):
    """`throughput_scaling_decision`, of all roles or of one."""

    UNSET = "unset"
    DISABLED = "disabled"
    NO_TRAFFIC_DATA = "no_traffic_data"
    PREDICT_FAILED = "predict_failed"
    MODEL_NOT_READY = "model_not_ready"
    PARTNER_NOT_READY = "partner_not_ready"
    NO_CHANGE = "no_change"
    SET_LOWER_BOUND = "set_lower_bound"
    SCALE = "scale"
    GPU_BUDGET_GUARD_HOLD = "gpu_budget_guard_hold"
    GPU_BUDGET_RECONCILE = "gpu_budget_reconcile"
    OVERRIDE_BY_USER_PLUGIN = "override_by_user_plugin"


# --- standing
# Where a policy stands between two pulls.


@dataclass(frozen=True, slots=True)
class FixedFleet:
    """The cheapest fixed fleet that would have kept as large a share over the same time. `share` and `gpu_hours` are
    what really came, `fixed_*` what that fleet would have made of it, by the queueing model."""

    hours: float
    share: float
    gpu_hours: float
    fleet: tuple[int, int]
    fixed_share: float
    fixed_gpu_hours: float

    @property
    def ratio(self) -> float:
        """The planner's GPU-hours over those of the fixed fleet, which has at least one worker."""
        return self.gpu_hours / self.fixed_gpu_hours

    def as_json(self) -> dict[str, Any]:
        """`fixed_fleet` in the planner's status."""
        return {
            "hours": self.hours,
            "share": self.share,
            "gpu_hours": self.gpu_hours,
            "prefill": self.fleet[0],
            "decode": self.fleet[1],
            "fixed_share": self.fixed_share,
            "fixed_gpu_hours": self.fixed_gpu_hours,
            "gpu_hours_ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """For `dynamo planner status`, and for the record of the last decision.

    `next_tick_at` is the time of the next decision (None: not before the present adjustment has ended). `deferred` are
    the components with an up that waits for a GPU. `interval_began_s` and `readings` are the inputs of the last
    decision. `models` names the source of each component's model. `fixed_fleet` is of the last day, or hour.
    """

    next_tick_at: float | None
    adjusting: bool = False
    deferred: tuple[str, ...] = ()
    interval_began_s: float = 0.0
    readings: tuple[Reading, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    fixed_fleet: FixedFleet | None = None


# --- traffic
# The traffic in a window of time: requests, lengths, latencies.

UNKNOWN = Missing("nobody has measured it")


@dataclass(frozen=True, slots=True)
class Traffic:
    """One window that ended at `at_s` (planner's clock, seconds) and lasted `duration_s`.

    `num_req` counts requests that began in it; 0 is silence, `Missing` is not knowing. The rest are means over the
    requests of the window: `isl` and `osl` in tokens, `ttft_ms`, `itl_ms`, `request_duration_s`. `kv_hit_rate` is the
    share (0..1) of prompt tokens with cached KV. `accept_length` is the number of tokens per decode pass (1 without
    speculation). A mean without a request is `Missing`, never 0; Dynamo's pages call that NaN.
    """

    at_s: float
    duration_s: float
    num_req: float | Missing = UNKNOWN
    isl: float | Missing = UNKNOWN
    osl: float | Missing = UNKNOWN
    ttft_ms: float | Missing = UNKNOWN
    itl_ms: float | Missing = UNKNOWN
    request_duration_s: float | Missing = UNKNOWN
    kv_hit_rate: float | Missing = UNKNOWN
    accept_length: float | Missing = UNKNOWN


# --- observation
# All that a planner is shown at once, and what it wants to be shown next time.


@dataclass(frozen=True, slots=True)
class Needs:
    """The data that a policy needs in the next observation, beside the loads. `traffic_window_s`: the length of the
    window of `Observation.traffic`, None for none. `requests`: those of that window one by one."""

    traffic_window_s: float | None = None
    passes: bool = False
    requests: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation: the workers always, the rest as far as it was wanted (None: not asked) and known (else
    `Missing`).

    `reading` has the moment of the observation, the prefill queue and the loads. `engines` holds one entry for each
    rank of each ready worker. `capabilities` is by component. `blind` says why the workers cannot be observed now
    (None: they can). `requests` are those of the traffic's window; None also where they are only counted together.
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


# --- series
# The windows of traffic that a planner remembers, in the form that predictors continue.

WINDOWS_MAX = 600
"""How many windows are remembered, unless somebody asks for more: 30 hours of 180 s."""
SOURCE = "builtin_load_predict"
"""Source of a prediction that continues a series, under Dynamo's name."""


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that began in one window, and their mean prompt and answer lengths (tokens; 0: not known yet)."""

    num_req: float
    isl: float
    osl: float


@dataclass(frozen=True, slots=True)
class Series:
    """The last `windows_max` windows of `window_s` seconds each, the oldest first; those of a warm-up come before the
    live ones. An immutable value: `after` gives the next one.

    `silent`: no request was seen since the start, or since the warm-up's end. Windows without any are not remembered
    until there is one, because they say when the service was switched on, and nothing about its load.

    `kv_hit_rate` (0..1) and `accept_length` (1 or more) are the last ones that were known; None: never. They are not
    forecast.
    """

    window_s: float
    windows: tuple[Window, ...] = ()
    windows_max: int = WINDOWS_MAX
    silent: bool = True
    kv_hit_rate: float | None = None
    accept_length: float | None = None

    def warmed_up(self, windows: Iterable[Window]) -> Series:
        """With these (of `warmup.read_warmup`) before the live ones, which are still to come."""
        return replace(self, windows=(*windows, *self.windows)[-self.windows_max :])

    def after(self, traffic: Traffic | Missing | None) -> Series:
        """With one more window.

        A window in which nobody counted adds nothing: it is unknown, not idle. Without requests it is idle: the count
        is 0, and the lengths are those of the window before. A count over another time than `window_s` is scaled to it.
        """
        if traffic is None or isinstance(traffic, Missing):
            return self
        seen = replace(
            self,
            kv_hit_rate=_known(traffic.kv_hit_rate, self.kv_hit_rate, 0.0, 1.0),
            accept_length=_known(traffic.accept_length, self.accept_length, 1.0),
        )
        counted = _known(traffic.num_req, None)
        if counted is None or traffic.duration_s <= 0:
            return seen
        num_req = counted * self.window_s / traffic.duration_s
        idle = num_req == 0
        if not math.isfinite(num_req) or (self.silent and idle):
            return seen
        before = self.windows[-1] if self.windows else Window(0.0, 0.0, 0.0)
        window = Window(
            num_req=num_req,
            isl=before.isl if idle else _known(traffic.isl, before.isl, 1.0) or 0.0,
            osl=before.osl if idle else _known(traffic.osl, before.osl) or 0.0,
        )
        return replace(seen, windows=(*self.windows, window)[-self.windows_max :], silent=False)

    @property
    def columns(self) -> tuple[tuple[float, ...], ...]:
        """`num_req`, `isl` and `osl` as three series. Lengths begin where they are first known."""
        counts = tuple(window.num_req for window in self.windows)
        return (
            counts,
            _without_leading_zeros(window.isl for window in self.windows),
            _without_leading_zeros(window.osl for window in self.windows),
        )

    @property
    def known(self) -> bool:
        """Whether there is something in each of the `columns`."""
        windows = self.windows
        return any(one.isl > 0 for one in reversed(windows)) and any(one.osl > 0 for one in reversed(windows))

    def prediction(self, forecasts: Forecasts | Missing, step: int = 1) -> Prediction | Missing:
        """The window `step` steps ahead (1: the next one), made of the forecasts of `columns`.

        `Missing` where one of them is, with its reason: half a prediction is none.
        """
        if isinstance(forecasts, Missing):
            return forecasts
        values: list[float] = []
        for name, ahead in zip(("num_req", "isl", "osl"), forecasts.values, strict=True):
            if isinstance(ahead, Missing):
                return Missing(f"{name}: {ahead.reason}")
            values.append(ahead[step - 1])
        num_req, isl, osl = values
        return Prediction(num_req, isl, osl, self.kv_hit_rate, self.accept_length, SOURCE)


def _known(value: float | Missing, before: float | None, low: float = 0.0, high: float = math.inf) -> float | None:
    """The value where it is known and makes sense, else the one before."""
    if isinstance(value, Missing) or not (math.isfinite(value) and low <= value <= high):
        return before
    return value


def _without_leading_zeros(values: Iterable[float]) -> tuple[float, ...]:
    found = tuple(values)
    first = next((index for index, value in enumerate(found) if value > 0), len(found))
    return found[first:]
