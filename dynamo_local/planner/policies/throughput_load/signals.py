"""The numbers that the load loop compares for one role: few numbers, each with its limit. `judged` decides from these
alone.

The tables of Dynamo 1.6.1 (and 001's flat rule, by option). Where ours departs from them:

* A target that a request could not meet on an empty engine cannot be met by more engines. Then more are wanted only
  while requests wait, and an idle role may shrink. In Dynamo such a role grows to the budget, and never shrinks.
* A prefill role that is busy most of the time does not shrink just because no queue was seen (consolidation).
* A role without any decode request shrinks, whatever a first request would see.
* An engine that takes over the answers of an aggregated engine takes over its prompts, too: the mean of these in a pass
  rises as the answers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.passes import NONE, EngineId, ForwardPass, Requests
from dynamo_local.core.types import Missing
from dynamo_local.planner.pass_model import Engine, Kind, itl_s, ttft_s
from dynamo_local.planner.values import Capabilities, Engines, EngineSeen, LoadScaling

# --- engines
# The state of each engine between two decisions of the load loop, from its forward-pass metrics.
#
# A snapshot every five seconds says little: an engine whose queue was long a moment ago is not idle. So a decision to
# go
# up is made from what is now, one to go down from the most since the last decision, and from the time spent in
# passes.
#
# A heartbeat says that no pass ended for a second. One that tells of requests is believed: that is an engine in a
# long
# pass. One that tells of none, after a pass that left a queue, is not: as far as can be told the engine hangs. It
# keeps
# its role from going down, and is no reason to go up.

PASSES_LOOKED_AT = 8
"""Passes of an engine in an observation, evenly spread: enough to see a queue, few enough for 64 workers with thousands
of passes."""

MAX_AGE_INTERVALS = 3
"""A last pass older than this many load intervals says nothing of now."""


_WALL_TIME_S = attrgetter("wall_time_s")


class EngineLoad(NamedTuple):
    """The waiting and running work of an engine."""

    queued_prefill_tokens: float = 0
    decode_requests: float = 0
    decode_kv_tokens: float = 0


IDLE = EngineLoad()


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """`now` is None where nothing is known of it. `most`: of each number since the last decision. `busy_s`: in passes
    since then."""

    component: str
    now: EngineLoad | None
    most: EngineLoad = IDLE
    busy_s: float = 0.0
    hung: bool = False
    last_pass: ForwardPass | None = None


Watches = Mapping[EngineId, EngineWatch]


def watched(watches: Watches, engines: Engines, *, now_s: float, max_age_s: float) -> dict[EngineId, EngineWatch]:
    """After one more observation; engines that are not in it are forgotten."""
    return {engine: _watch(watches.get(engine), seen, now_s - max_age_s) for engine, seen in engines.items()}


def begun_anew(watches: Watches) -> dict[EngineId, EngineWatch]:
    """After a decision: what is most is what is now, and no time has been spent."""
    return {
        engine: EngineWatch(one.component, one.now, one.now or IDLE, 0.0, one.hung, one.last_pass)
        for engine, one in watches.items()
    }


def spread(passes: tuple[ForwardPass, ...], count: int) -> tuple[ForwardPass, ...]:
    """At most so many of them, evenly spread, the newest included."""
    step = -(-len(passes) // count)
    return passes if step <= 1 else passes[::-step][::-1]


def _watch(before: EngineWatch | None, seen: EngineSeen, oldest_s: float) -> EngineWatch:
    if before is None:
        before = EngineWatch(seen.component, None)
    last, passes = seen.last, seen.passes
    last_pass = before.last_pass
    if passes:
        last_pass = passes[-1]
    elif not isinstance(last, Missing) and not last.heartbeat:
        last_pass = last
    now, hung = _now(last, last_pass, oldest_s)
    most = _most(before.most if now is None else _larger(before.most, now), spread(passes, PASSES_LOOKED_AT))
    return EngineWatch(seen.component, now, most, before.busy_s + _busy_s(passes, before.last_pass), hung, last_pass)


def _busy_s(passes: tuple[ForwardPass, ...], before: ForwardPass | None) -> float:
    """Time in passes; those that were left out (their numbers say how many) took as long as those that were told."""
    if not passes:
        return 0.0
    first = passes[0].counter_id - 1 if before is None else before.counter_id
    return sum(map(_WALL_TIME_S, passes)) * max(1.0, (passes[-1].counter_id - first) / len(passes))


def _now(last: ForwardPass | Missing, last_pass: ForwardPass | None, oldest_s: float) -> tuple[EngineLoad | None, bool]:
    if isinstance(last, Missing) or last.at_s < oldest_s:
        return None, False
    if not last.heartbeat or last.queued != NONE or last.scheduled != NONE:
        return _load(last), False
    if last_pass is not None and _waiting(last_pass.queued):
        return _load(last_pass), True
    return IDLE, False


def _waiting(queued: Requests) -> bool:
    return queued.sum_prefill_tokens > 0 or queued.num_prefill_requests > 0 or queued.num_decode_requests > 0


def _load(one: ForwardPass) -> EngineLoad:
    scheduled, queued = one.scheduled, one.queued
    return EngineLoad(
        queued.sum_prefill_tokens,
        scheduled.num_decode_requests + queued.num_decode_requests,
        scheduled.sum_decode_kv_tokens + queued.sum_decode_kv_tokens,
    )


def _most(load: EngineLoad, passes: tuple[ForwardPass, ...]) -> EngineLoad:
    """The largest of each number. (Written out: it is done for a thousand passes in a tick.)"""
    tokens, requests, kv = load
    for one in passes:
        scheduled, queued = one.scheduled, one.queued
        if queued.sum_prefill_tokens > tokens:
            tokens = queued.sum_prefill_tokens
        if (count := scheduled.num_decode_requests + queued.num_decode_requests) > requests:
            requests = count
        if (held := scheduled.sum_decode_kv_tokens + queued.sum_decode_kv_tokens) > kv:
            kv = held
    return EngineLoad(tokens, requests, kv)


def _larger(one: EngineLoad, other: EngineLoad) -> EngineLoad:
    return EngineLoad(*map(max, one, other))


class Compared(NamedTuple):
    """A number and its limit. It holds where the number is above (`over`) or below it; `equal`: or at it."""

    name: str
    value: float
    limit: float
    over: bool
    equal: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value is beyond its limit (or at it, where that counts)."""
        if self.value == self.limit:
            return self.equal
        return (self.value > self.limit) is self.over


class Signals(NamedTuple):
    """Up where any of `up` holds, down where all of `down` do. `low`: what `down` says of the engines as they are;
    where it holds and `down` does not, one engine less would have too much."""

    up: tuple[Compared, ...] = ()
    down: tuple[Compared, ...] = ()
    low: tuple[Compared, ...] = ()


NO_SIGNALS = Signals()


class RoleLoad(NamedTuple):
    """One role for a decision. `now` are the loads of the engines that run (those that hang left out), `most` the most
    of each since the last decision. `shared`: by how much the load of an engine rises when one worker less is there.
    `busy` is the largest share of the time (0..1) that an engine spent in passes."""

    kind: Kind
    now: Sequence[EngineLoad]
    most: Sequence[EngineLoad]
    hung: int
    shared: float
    busy: float
    engine: Engine
    reported: Capabilities | None


def judged(signals: Signals, *, capacity: int, floor: int) -> LoadScaling:
    """`SCALE_UP`, `SCALE_DOWN`, or why neither. `floor`: of the endpoint, not of the throughput loop."""
    if any(compared.holds for compared in signals.up):
        return LoadScaling.SCALE_UP
    if capacity <= max(1, floor) or not signals.down:
        return LoadScaling.NO_CHANGE
    if all(compared.holds for compared in signals.down):
        return LoadScaling.SCALE_DOWN
    if signals.low and all(compared.holds for compared in signals.low):
        return LoadScaling.SCALE_DOWN_REFUSED_CONSOLIDATION
    return LoadScaling.NO_CHANGE


def signals_of(load: RoleLoad, options: PlannerConfig) -> Signals | None:
    """None where what is needed is not known: a model that is not ready, a limit that no engine tells."""
    found = _by_models(load, options) if options.optimization_target == "sla" else _by_table(load, options)
    if found is None or not load.hung:
        return found
    hung = Compared("engines_hung", load.hung, 0, over=False, equal=True)
    return Signals(found.up, (*found.down, hung), (*found.low, hung))


def worst_estimates(load: RoleLoad, options: PlannerConfig) -> dict[str, float]:
    """TTFT and ITL (ms) of the next request on the engine where they are longest; nothing without a model."""
    if options.optimization_target != "sla" or not load.engine.model.ready or not load.now:
        return {}
    found = {}
    if load.kind is not Kind.DECODE:
        rides = load.kind is Kind.AGG
        found["estimated_ttft_ms"] = max(_ttft_ms(load.engine, one, 1.0, rides) for one in load.now)
    if load.kind is not Kind.PREFILL:
        found["estimated_itl_ms"] = max(_itl_ms(load, one, 1.0) for one in load.now)
    return found


# --- sla -----------------------------------------------------------------------------------------


def _by_models(load: RoleLoad, options: PlannerConfig) -> Signals | None:
    if not load.engine.model.ready:
        return None
    if load.kind is Kind.PREFILL:
        return _prefill(load, options)
    if load.kind is Kind.DECODE:
        return _decode(load, options)
    prefill, decode = _prefill(load, options), _decode(load, options)
    if load.engine.model.isl.mean is None and not any(one.queued_prefill_tokens for one in load.most):
        return decode  # no prompt was ever seen: nothing to say about them
    return Signals((*prefill.up, *decode.up), (*prefill.down, *decode.down), (*prefill.low, *decode.low))


def _prefill(load: RoleLoad, options: PlannerConfig) -> Signals:
    engine, sla = load.engine, options.ttft_ms
    rides = load.kind is Kind.AGG
    alone = _ttft_ms(engine, IDLE, 1.0, rides)
    up = _all_over("estimated_ttft_ms_min", [_ttft_ms(engine, one, 1.0, rides) for one in load.now], max(sla, alone))
    share = options.load_scaling_down_sensitivity / 100
    if options.scale_down_rule == "flat":
        worst = max((_ttft_ms(engine, one, 1.0, rides) for one in load.most), default=0.0)
        return Signals(up, (Compared("estimated_ttft_ms_max", worst, sla * share, over=False),))

    most = set(load.most)

    def waits(shared: float, name: str) -> Compared:
        """The wait behind the queue, of the engine where least of what it may be is left."""
        waiting, allowed = 0.0, max(0.0, sla - alone) * share
        for one in most:
            own = _ttft_ms(engine, one._replace(queued_prefill_tokens=0), shared, rides)
            wait, may = _ttft_ms(engine, one, shared, rides) - own, max(0.0, sla - own) * share
            if may - wait < allowed - waiting:
                waiting, allowed = wait, may
        return Compared(name, waiting, allowed, over=False, equal=share > 0 and alone >= sla)

    def busy(shared: float, name: str) -> tuple[Compared, ...]:
        return () if rides else (Compared(name, load.busy * shared, share, over=False),)

    return Signals(
        up,
        (waits(load.shared, "waiting_ms_consolidated"), *busy(load.shared, "prefill_busy_consolidated")),
        (waits(1.0, "waiting_ms_max"), *busy(1.0, "prefill_busy_max")),
    )


def _decode(load: RoleLoad, options: PlannerConfig) -> Signals:
    engine, sla = load.engine, options.itl_ms
    with_prompts = load.kind is Kind.AGG

    def itl_ms(one: EngineLoad, shared: float = 1.0, *, queue: bool = False) -> float:
        return _itl_ms(load, one, shared, queue=queue)

    alone = 1000 * itl_s(engine, 0, 0)  # without the prompts of others, which more engines would take off it
    up = _all_over("estimated_itl_ms_min", [itl_ms(one) for one in load.now], max(sla, alone))
    share = options.load_scaling_down_sensitivity / 100
    if options.scale_down_rule == "flat":
        worst = max((itl_ms(one) for one in load.most), default=0.0)
        return Signals(up, (Compared("estimated_itl_ms_max", worst, sla * share, over=False),))
    idle = all(_kv(one, with_prompts) == 0 and one.decode_requests == 0 for one in load.most)

    def under(shared: float, name: str) -> tuple[Compared, ...]:
        itl = 0.0 if idle else max(itl_ms(one, shared, queue=with_prompts) for one in load.most)
        kv = max((_kv(one, with_prompts) * shared for one in load.most), default=0.0)
        return (
            Compared(f"estimated_itl_ms_{name}", itl, sla * share, over=False),
            Compared(f"decode_kv_tokens_{name}", kv, engine.limits.max_kv_tokens, over=False),
        )

    return Signals(up, under(load.shared, "consolidated"), under(1.0, "max"))


def _ttft_ms(engine: Engine, one: EngineLoad, shared: float, rides: bool) -> float:
    requests, kv = (one.decode_requests * shared, one.decode_kv_tokens * shared) if rides else (0.0, 0.0)
    return 1000 * ttft_s(engine, one.queued_prefill_tokens * shared, decode_requests=requests, decode_kv=kv)


def _itl_ms(load: RoleLoad, one: EngineLoad, shared: float, *, queue: bool = False) -> float:
    """With the mean prefill that rides along in an aggregated engine."""
    prefill = (load.engine.model.prefill_tokens.mean or 0.0) * shared if load.kind is Kind.AGG else 0.0
    return 1000 * itl_s(load.engine, one.decode_requests * shared, _kv(one, queue) * shared, prefill_tokens=prefill)


def _all_over(name: str, values: list[float], limit: float) -> tuple[Compared, ...]:
    """All are above the limit if the least of them is."""
    return (Compared(name, min(values), limit, over=True),) if values else ()


def _kv(one: EngineLoad, with_queue: bool) -> float:
    return one.decode_kv_tokens + (one.queued_prefill_tokens if with_queue else 0)


# --- static targets ------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A static target's thresholds: any engine above `up` (or at it), all below `down` (or at it)."""

    up: float
    up_equal: bool
    down: float
    down_equal: bool


_PREFILL_ROWS = {"throughput": _Row(1.0, True, 0.1, False), "latency": _Row(0.1, True, 0.0, True)}
_DECODE_ROWS = {"throughput": _Row(1.0, False, 0.6, False), "latency": _Row(0.4, False, 0.1, False)}


def _by_table(load: RoleLoad, options: PlannerConfig) -> Signals | None:
    """Prefill: queued tokens, as a share of the context length. Decode: KV scheduled and queued, as a share of the
    cache; an aggregated engine's queued prompts count as KV that it will need."""
    target = options.optimization_target
    reported = load.reported or Capabilities()
    if load.kind is Kind.PREFILL:
        own = options.prefill_scale_up_queue_tokens, options.prefill_scale_down_queue_tokens
        whole: float | None = 1.0 if target == "load" else reported.context_length
        return _rows("prefill_queue", load, _row(_PREFILL_ROWS, target, *own), whole, _queue)
    own = options.decode_scale_up_kv_rate, options.decode_scale_down_kv_rate
    whole = reported.max_kv_tokens
    if target == "load" and whole is not None:
        whole /= 100
    return _rows(
        "decode_kv", load, _row(_DECODE_ROWS, target, *own), whole, lambda one: _kv(one, load.kind is Kind.AGG)
    )


def _row(rows: dict[str, _Row], target: str, up: float | None, down: float | None) -> _Row | None:
    if target != "load":
        return rows[target]
    return None if up is None or down is None else _Row(up, True, down, True)


def _queue(one: EngineLoad) -> float:
    return one.queued_prefill_tokens


def _rows(
    name: str, load: RoleLoad, row: _Row | None, whole: float | None, of: Callable[[EngineLoad], float]
) -> Signals | None:
    if row is None or not whole:
        return None
    now = max((of(one) / whole for one in load.now), default=0.0)
    most = max((of(one) / whole for one in load.most), default=0.0)
    low = Compared(f"{name}_max", most, row.down, over=False, equal=row.down_equal)
    consolidated = Compared(f"{name}_consolidated", most * load.shared, row.up, over=False)
    return Signals((Compared(f"{name}_any", now, row.up, over=True, equal=row.up_equal),), (low, consolidated), (low,))
