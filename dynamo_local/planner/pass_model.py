"""How long a pass of one kind of engine takes, by what is in it, learned from its forward-pass metrics. Immutable."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.errors import BadInput
from dynamo_local.planner.values import Capabilities

# --- regression
# Least squares over a bounded set of samples that stays spread over what was seen. Pure, and without numpy: a fit of
# 64 samples takes a tenth of a millisecond, so that it may run in the arbiter's loop.
#
# The fit standardises its features and leaves out a direction in which they do not vary. Under constant load requests
# and their KV always rise together. Then both share the effect, instead of two large numbers of opposite sign.

MIN_PREDICTION_S = 1e-6
"""No pass takes less."""

_FLAT = 1e-9
"""As a share of the mean: a feature that varies less does not vary. As a distance from 1: two features whose
correlation is nearer to 1 are one."""


class Sample(NamedTuple):
    """One or two features, and what was measured (seconds)."""

    x: tuple[float, ...]
    y: float


@dataclass(frozen=True, slots=True)
class Linear:
    """`intercept + sum(coefficients * x)`, in seconds."""

    coefficients: tuple[float, ...]
    intercept: float

    def at(self, x: tuple[float, ...]) -> float:
        """Seconds; at least a microsecond."""
        value = self.intercept
        for coefficient, feature in zip(self.coefficients, x, strict=True):
            value += coefficient * feature
        return max(MIN_PREDICTION_S, value)


def kept(samples: Sequence[Sample], *, most: int, buckets: int) -> tuple[Sample, ...]:
    """The samples that are kept, oldest first, at most `most`: the fullest bucket loses its oldest until it is so.

    Buckets divide the range that was seen into `buckets` equal parts, for two features into a square of as many
    (16: 4 x 4). So a load that stays the same for an hour does not push out what was learned of other loads.
    """
    if len(samples) <= most:
        return tuple(samples)
    dimensions = len(samples[0].x)
    parts = buckets if dimensions == 1 else math.isqrt(buckets)
    places = [0] * len(samples)
    for values in zip(*(sample.x for sample in samples), strict=True):
        low = min(values)
        span = max(values) - low
        if span > 0:
            last = parts - 1
            places = [
                place * parts + min(last, int(parts * (value - low) / span))
                for place, value in zip(places, values, strict=True)
            ]
    spaces: dict[int, deque[int]] = {}
    for index, place in enumerate(places):
        spaces.setdefault(place, deque()).append(index)
    dropped = set()
    counts = {place: len(indices) for place, indices in spaces.items()}
    for _ in range(len(samples) - most):
        largest = max(counts.values())
        fullest = min(
            (place for place, count in counts.items() if count == largest), key=lambda place: spaces[place][0]
        )
        dropped.add(spaces[fullest].popleft())
        counts[fullest] -= 1
    return tuple(sample for index, sample in enumerate(samples) if index not in dropped)


def fitted(samples: Sequence[Sample]) -> Linear | None:
    """The least squares line or plane with intercept. A feature that does not vary has the coefficient 0; None where
    none varies: then nothing is known of what a larger load would take."""
    if not samples:
        return None
    count, dimensions = len(samples), len(samples[0].x)
    means = [sum(sample.x[d] for sample in samples) / count for d in range(dimensions)]
    mean_y = sum(sample.y for sample in samples) / count
    spreads = [math.sqrt(sum((sample.x[d] - means[d]) ** 2 for sample in samples) / count) for d in range(dimensions)]
    varied = [d for d in range(dimensions) if spreads[d] > _FLAT * max(1.0, abs(means[d]))]
    if not varied:
        return None
    with_y = [
        sum((sample.x[d] - means[d]) * (sample.y - mean_y) for sample in samples) / (count * spreads[d]) for d in varied
    ]
    if len(varied) == 1:
        slopes = [with_y[0]]
    else:
        first, second = varied
        between = sum((s.x[first] - means[first]) * (s.x[second] - means[second]) for s in samples)
        slopes = _solved(with_y[0], with_y[1], between / (count * spreads[first] * spreads[second]))
    coefficients = [0.0] * dimensions
    for d, slope in zip(varied, slopes, strict=True):
        coefficients[d] = slope / spreads[d]
    offset = sum(coefficient * mean for coefficient, mean in zip(coefficients, means, strict=True))
    return Linear(tuple(coefficients), mean_y - offset)


def proportional(samples: Sequence[Sample]) -> Linear:
    """The line through 0 of one feature above 0: the most that a larger load takes, whatever the fixed part is."""
    return Linear((sum(sample.y for sample in samples) / sum(sample.x[0] for sample in samples),), 0.0)


def spread(samples: Sequence[Sample], dimension: int) -> float:
    """How much a feature varies: its standard deviation over its mean; 0 for one that does not."""
    values = [sample.x[dimension] for sample in samples]
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return deviation / abs(mean) if deviation > _FLAT * max(1.0, abs(mean)) and mean else 0.0


def _solved(first: float, second: float, correlation: float) -> list[float]:
    """Both standardised slopes: the pseudo-inverse of [[1, c], [c, 1]], by its eigenvectors (1, 1) and (1, -1)."""
    together = (first + second) / (2 * (1 + correlation)) if 1 + correlation > _FLAT else 0.0
    apart = (first - second) / (2 * (1 - correlation)) if 1 - correlation > _FLAT else 0.0
    return [together + apart, together - apart]


class Kind(enum.StrEnum):
    """The work of an engine. The duration of its passes depends on it."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"


Features = Literal["dynamo", "seed"]
"""Which numbers of a pass its duration depends on.

Both: `prefill` by [sum_prefill_tokens], `agg` by [sum_prefill_tokens, sum_decode_kv_tokens]. For `decode` Dynamo
1.6.1 takes [num_decode_requests, sum_decode_kv_tokens], its first design the second only. For `agg` 1.6.1 learns from
each pass, the first design from means over all passes of a worker in the interval.
"""


class Learning(NamedTuple):
    """How samples are kept, under Dynamo's names: `load_min_observations`, `max_num_fpm_samples`,
    `fpm_sample_bucket_size` (a perfect square), and the features."""

    least: int = 5
    most: int = 64
    buckets: int = 16
    features: Features = "dynamo"


NARROW = 0.05
"""Prompts whose lengths vary by less than this share of their mean tell what such a prompt takes, and no more."""

RECENT = 64
"""So many values a mean is of."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The last `RECENT` values of something, whose mean is asked for: once for each engine and tick, so it is at hand.

    `mean` is None before the first value: never 0."""

    values: tuple[float, ...] = ()
    mean: float | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", sum(self.values) / len(self.values) if self.values else None)

    def with_(self, more: Sequence[float]) -> Recent:
        """With these, the newest last."""
        return Recent((*self.values, *more)[-RECENT:]) if more else self


NOTHING, USUAL = Recent(), Learning()


@dataclass(frozen=True, slots=True)
class PassModel:
    """`line` is None while the model is not ready: fewer than `learning.least` samples, a load that never varied, or
    one that seemed to make passes shorter. (Prompts of one length will do: a longer one takes at most as much more.)
    `source` says where its first samples came from: `worker`, `profile`, `live` (or nowhere yet: "").

    The means are of live passes alone, without heartbeats: `isl` and `decode_length` in tokens per request and pass,
    `prefill_tokens` per pass.
    """

    kind: Kind
    learning: Learning = USUAL
    samples: tuple[Sample, ...] = ()
    line: Linear | None = None
    source: str = ""
    isl: Recent = NOTHING
    decode_length: Recent = NOTHING
    prefill_tokens: Recent = NOTHING
    _per: tuple[float, float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_per", self._coefficients())

    @property
    def ready(self) -> bool:
        """Whether it can answer."""
        return self.line is not None

    def trained(self, passes: Sequence[ForwardPass], source: str) -> PassModel:
        """With passes of a benchmark or a profile: they say how long passes take, not what this traffic is like."""
        found = self._samples(passes)
        return self if not found else self._with(found, source)

    def observed(self, *engines: Sequence[ForwardPass]) -> PassModel:
        """With passes of live engines of this kind, those of each by themselves and oldest first. Heartbeats change
        nothing."""
        found = [sample for passes in engines for sample in self._samples(passes)]
        model = self._with(found, self.source or "live") if found else self
        real = [one.scheduled for passes in engines for one in passes if not one.heartbeat]
        if not real:
            return model
        prompts = [s.sum_prefill_tokens / s.num_prefill_requests for s in real if s.num_prefill_requests > 0]
        contexts = [s.sum_decode_kv_tokens / s.num_decode_requests for s in real if s.num_decode_requests > 0]
        return replace(
            model,
            isl=model.isl.with_(prompts),
            decode_length=model.decode_length.with_(contexts),
            prefill_tokens=model.prefill_tokens.with_([float(s.sum_prefill_tokens) for s in real]),
        )

    def pass_s(self, *, prefill_tokens: float = 0, decode_requests: float = 0, decode_kv: float = 0) -> float:
        """Seconds that such a pass takes. The model must be ready."""
        line, (per_token, per_request, per_kv) = self.line, self._per
        assert line is not None, "a model that is not ready was asked"
        took_s = line.intercept + per_token * prefill_tokens + per_request * decode_requests + per_kv * decode_kv
        return took_s if took_s > MIN_PREDICTION_S else MIN_PREDICTION_S

    def _coefficients(self) -> tuple[float, float, float]:
        """The line's, of prompt tokens, decode requests and their KV; 0 of what the duration does not depend on.

        `pass_s` is asked some hundred times in a tick, so that it finds them in their places."""
        if self.line is None:
            return 0.0, 0.0, 0.0
        of = self.line.coefficients
        if self.kind is Kind.PREFILL:
            return of[0], 0.0, 0.0
        if self.kind is Kind.AGG:
            return of[0], 0.0, of[1]
        return (0.0, of[0], of[1]) if self._by_requests else (0.0, 0.0, of[0])

    def _with(self, found: Sequence[Sample], source: str) -> PassModel:
        rules = self.learning
        samples = kept((*self.samples, *found), most=rules.most, buckets=rules.buckets)
        # A fit that cannot be (few loads, all alike, say little apart) takes nothing away from the last that could.
        return replace(self, samples=samples, line=self._line(samples) or self.line, source=source)

    def _line(self, samples: tuple[Sample, ...]) -> Linear | None:
        if len(samples) < self.learning.least:
            return None
        if self.kind is Kind.PREFILL and spread(samples, 0) < NARROW:
            return proportional(samples)
        if any(spread(samples, dimension) == 0 for dimension in self._must_vary()):
            return None
        line = fitted(samples)
        if line is not None and self._by_requests and line.coefficients[0] < 0:
            # More requests with the same KV do not make a pass shorter: by the KV alone, then.
            alone = fitted([Sample((sample.x[1],), sample.y) for sample in samples])
            line = None if alone is None else Linear((0.0, *alone.coefficients), alone.intercept)
        if line is None or min(line.coefficients) < 0:
            return None
        return line

    @property
    def _by_requests(self) -> bool:
        return self.kind is Kind.DECODE and self.learning.features == "dynamo"

    def _must_vary(self) -> tuple[int, ...]:
        if self.kind is Kind.AGG:
            return (0, 1)
        return (1,) if self._by_requests else (0,)

    def _x(self, prefill_tokens: float, decode_requests: float, decode_kv: float) -> tuple[float, ...]:
        if self.kind is Kind.PREFILL:
            return (prefill_tokens,)
        if self.kind is Kind.AGG:
            return (prefill_tokens, decode_kv)
        return (decode_requests, decode_kv) if self._by_requests else (decode_kv,)

    def _samples(self, passes: Iterable[ForwardPass]) -> list[Sample]:
        """The usable samples: passes that took time, and in which there was nothing but what is learned (a
        decode worker also prefills short prompts by itself)."""
        found = []
        for one in passes:
            if one.heartbeat or not math.isfinite(one.wall_time_s):
                continue
            s = one.scheduled
            prefills, decodes = s.sum_prefill_tokens > 0, s.num_decode_requests > 0 or s.sum_decode_kv_tokens > 0
            if self.kind is Kind.AGG:
                wanted = prefills or decodes
            else:
                wanted = prefills is (self.kind is Kind.PREFILL) and decodes is (self.kind is Kind.DECODE)
            if wanted:
                x = self._x(s.sum_prefill_tokens, s.num_decode_requests, s.sum_decode_kv_tokens)
                found.append(Sample(x, one.wall_time_s))
        if found and self.kind is Kind.AGG and self.learning.features == "seed":
            return [_mean(found)]
        return found


def _mean(samples: Sequence[Sample]) -> Sample:
    count, dimensions = len(samples), range(len(samples[0].x))
    x = tuple(sum(sample.x[d] for sample in samples) / count for d in dimensions)
    return Sample(x, sum(sample.y for sample in samples) / count)


# --- bootstrap
# A first model before there is traffic, from a worker's own benchmark or from a profile. Pure: plain numbers in. Each
# model goes on learning from live passes in any case.

_PROFILED = EngineId("profile")


WORKER, PROFILE = "worker", "profile"
"""Where a model's first samples came from."""


def bootstrapped(model: PassModel, profile: Sequence[ForwardPass]) -> PassModel:
    """The model trained with a profile's passes; as it is where they do not make it ready."""
    known = model.trained(profile, PROFILE)
    return known if known.ready else model


def begun_anew(model: PassModel, benchmark: Sequence[ForwardPass]) -> PassModel:
    """A model of the passes that a worker measured of itself, which go before all that was learned; what is known of
    the traffic stays. The model as it is where they do not make it ready."""
    known = replace(model, samples=(), line=None).trained(benchmark, WORKER)
    return known if known.ready else model


def prefill_passes(isl: Sequence[float], ttft_ms: Sequence[float]) -> tuple[ForwardPass, ...]:
    """A profile's prefill sweep as passes: each one prompt of `isl` tokens, which took `ttft_ms`.

    Raises `BadInput` where the columns have different lengths; rows that are not positive numbers are left out.
    """
    return tuple(
        _pass(ms, Requests(num_prefill_requests=1, sum_prefill_tokens=round(tokens)))
        for tokens, ms in _rows(isl, ttft_ms)
    )


def decode_passes(
    kv_usage: Sequence[float], context_length: Sequence[float], itl_ms: Sequence[float], max_kv_tokens: float
) -> tuple[ForwardPass, ...]:
    """A profile's decode sweep as passes: `kv_usage` (0..1) of `max_kv_tokens`, by requests of `context_length` tokens
    each, in which a token took `itl_ms`. Raises and leaves out as `prefill_passes` does."""
    passes = []
    for usage, context, ms in _rows(kv_usage, context_length, itl_ms):
        kv = round(usage * max_kv_tokens)
        requests = max(1, round(kv / context))
        passes.append(_pass(ms, Requests(num_decode_requests=requests, sum_decode_kv_tokens=kv)))
    return tuple(passes)


def _pass(ms: float, scheduled: Requests) -> ForwardPass:
    return ForwardPass(_PROFILED, 0, ms / 1000, scheduled)


def _rows(*columns: Sequence[float]) -> Iterable[tuple[float, ...]]:
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(str(len(column)) for column in columns)
        raise BadInput(f"the profile's columns have different lengths ({lengths}): each row is one measurement")
    return (row for row in zip(*columns, strict=True) if all(math.isfinite(v) and v > 0 for v in row))


# --- estimates
# Estimates from the duration of a pass: the next request's TTFT, the ITL at a load, an engine's capacity.
#
# Durations are in seconds, lengths in tokens. Each function needs a model that is ready.

MAX_HIT_RATE = 0.95
"""Some of each prompt is always computed."""

MAX_BATCHES = 128
"""So many batch sizes are tried for a capacity."""


class Limits(NamedTuple):
    """An engine's limits. The defaults are Dynamo's, for engines that do not tell theirs."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_kv_tokens: int = 2_000_000


USUAL_ESTIMATES = Limits()


def limits_of(reported: Capabilities | None) -> Limits:
    """The limits that an engine reports, with defaults for the rest."""
    if reported is None:
        return USUAL_ESTIMATES
    return Limits(
        reported.max_num_batched_tokens or USUAL_ESTIMATES.max_num_batched_tokens,
        reported.max_num_seqs or USUAL_ESTIMATES.max_num_seqs,
        reported.max_kv_tokens or USUAL_ESTIMATES.max_kv_tokens,
    )


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine for estimates: its model, its limits, and what of the traffic changes the work it has.

    `hit_rate` (0..1) discounts prompts only; `accept_length` is the tokens per decode pass, 1 without speculation.
    """

    model: PassModel
    limits: Limits = USUAL_ESTIMATES
    hit_rate: float = 0.0
    accept_length: float = 1.0

    @property
    def computed_share(self) -> float:
        """Share of a prompt that the cache does not have."""
        return 1.0 - min(MAX_HIT_RATE, max(0.0, self.hit_rate))


def ttft_s(engine: Engine, queued_tokens: float, *, decode_requests: float = 0, decode_kv: float = 0) -> float:
    """TTFT of the next request, behind so many tokens of queued prompts: passes of `max_num_batched_tokens` and a last
    one. In an aggregated engine the decode rides along in each of them. The next prompt is as long as the last 64 were
    (before the first: only the queue counts)."""
    tokens = math.ceil((queued_tokens + (engine.model.isl.mean or 0.0)) * engine.computed_share)
    return _prefill_s(engine, tokens, engine.limits.max_num_batched_tokens, decode_requests, decode_kv)


def itl_s(engine: Engine, decode_requests: float, decode_kv: float, *, prefill_tokens: float = 0) -> float:
    """With one more request of the usual length than this load."""
    kv = decode_kv + (engine.model.decode_length.mean or 0.0)
    one = engine.model.pass_s(prefill_tokens=prefill_tokens, decode_requests=decode_requests + 1, decode_kv=kv)
    return one / engine.accept_length


class Capacity(NamedTuple):
    """The most requests per second of one engine, with `batch` of them at once. `within`: the targets can be kept."""

    rps: float
    batch: int
    within: bool


def prefill_capacity(engine: Engine, *, isl: float, ttft_target_s: float) -> Capacity:
    """Capacity of a prefill engine, for prompts of this mean length (above 0)."""
    tokens = isl * engine.computed_share
    limits = engine.limits
    most = max(1, min(limits.max_num_seqs, int(limits.max_num_batched_tokens // tokens)))

    def tried(batch: int) -> tuple[float, bool]:
        took_s = _prefill_s(engine, batch * tokens, limits.max_num_batched_tokens, 0, 0)
        return batch / took_s, took_s <= ttft_target_s

    return _best(most, tried)


def decode_capacity(engine: Engine, *, isl: float, osl: float, itl_target_s: float) -> Capacity:
    """Capacity of a decode engine. A request holds its whole prompt (a hit saves computing, not memory) and half its
    answer."""
    context = max(1.0, isl + osl // 2)

    def tried(batch: int) -> tuple[float, bool]:
        one_s = engine.model.pass_s(decode_requests=batch, decode_kv=batch * context) / engine.accept_length
        return batch / (max(1.0, osl) * one_s), one_s <= itl_target_s

    return _best(_fit(engine, context), tried)


def agg_capacity(engine: Engine, *, isl: float, osl: float, ttft_target_s: float, itl_target_s: float) -> Capacity:
    """Capacity of an aggregated engine in balance: each pass also prefills for as many requests as end in it."""
    context, tokens = max(1.0, isl + osl // 2), isl * engine.computed_share
    batched, answer = engine.limits.max_num_batched_tokens, max(1.0, osl)

    def prefilled(batch: int) -> int:
        return math.ceil(batch * engine.accept_length * tokens / answer)

    def tried(batch: int) -> tuple[float, bool]:
        kv, space = batch * context, max(1, batched - batch)
        one_s = engine.model.pass_s(prefill_tokens=min(prefilled(batch), space), decode_requests=batch, decode_kv=kv)
        itl, ttft = one_s / engine.accept_length, _prefill_s(engine, tokens, space, batch, kv)
        return batch / (answer * itl), itl <= itl_target_s and ttft <= ttft_target_s

    most = _fit(engine, context)
    if prefilled(most) > batched - most:  # the largest batch that leaves room for its prompts
        most = max(1, int(batched / (1 + engine.accept_length * tokens / answer)))
        while most > 1 and prefilled(most) > batched - most:
            most -= 1
    return _best(most, tried)


def _fit(engine: Engine, context: float) -> int:
    """So many requests fit into the cache and the batch."""
    return max(1, min(engine.limits.max_num_seqs, int(engine.limits.max_kv_tokens // context)))


def _best(most: int, tried: Callable[[int], tuple[float, bool]]) -> Capacity:
    """The most requests per second within the targets. Where none keeps them: those of a batch of one, the fastest.

    A batch of one keeps whatever any other keeps (a larger batch never makes a pass shorter), so that a stricter target
    never gives more capacity. Dynamo takes the best of all batches where none keeps the targets, which does.
    """
    rps, within = tried(1)
    best = Capacity(rps, 1, within)
    for batch in _batches(most):
        rps, keeps = tried(batch)
        if keeps and rps > best.rps:
            best = Capacity(rps, batch, within)
    return best


def _batches(most: int) -> Iterator[int]:
    """1 .. most, evenly thinned to `MAX_BATCHES` of them, both ends included."""
    if most <= MAX_BATCHES:
        yield from range(1, most + 1)
        return
    for n in range(MAX_BATCHES):
        yield 1 + round(n * (most - 1) / (MAX_BATCHES - 1))


def _prefill_s(engine: Engine, tokens: float, space: int, decode_requests: float, decode_kv: float) -> float:
    """Passes of `room` tokens and a last one."""
    if tokens <= 0:
        return 0.0
    full, tail = divmod(tokens, space)
    model, took_s = engine.model, 0.0
    if full:
        whole_s = model.pass_s(prefill_tokens=space, decode_requests=decode_requests, decode_kv=decode_kv)
        took_s += full * whole_s
    if tail > 0:
        took_s += model.pass_s(prefill_tokens=tail, decode_requests=decode_requests, decode_kv=decode_kv)
    return took_s
