"""How long a pass of one kind of engine takes, by what is in it, learned from its forward-pass metrics. Immutable."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dynamo_local.planner.models.regression import MIN_PREDICTION_S, Linear, Sample, fitted, kept, proportional, spread
from dynamo_local.planner.values.passes import ForwardPass


class Kind(enum.StrEnum):
    """What an engine does, and so what its passes depend on."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"


class Features(enum.StrEnum):
    """Which numbers of a pass its duration depends on.

    Both: `prefill` by [sum_prefill_tokens], `agg` by [sum_prefill_tokens, sum_decode_kv_tokens]. For `decode` Dynamo
    1.6.1 takes [num_decode_requests, sum_decode_kv_tokens], seed 001 the second only. For `agg` 1.6.1 learns from each
    pass, 001 from means over all passes of a worker in the interval.
    """

    DYNAMO = "dynamo"
    SEED = "seed"


class Learning(NamedTuple):
    """How samples are kept, under Dynamo's names: `load_min_observations`, `max_num_fpm_samples`,
    `fpm_sample_bucket_size` (a perfect square), and the features."""

    least: int = 5
    most: int = 64
    buckets: int = 16
    features: Features = Features.DYNAMO


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
        return self.kind is Kind.DECODE and self.learning.features is Features.DYNAMO

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
        """What can be learned from: passes that took time, and in which there was nothing but what is learned (a
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
        if found and self.kind is Kind.AGG and self.learning.features is Features.SEED:
            return [_mean(found)]
        return found


def _mean(samples: Sequence[Sample]) -> Sample:
    count, dimensions = len(samples), range(len(samples[0].x))
    x = tuple(sum(sample.x[d] for sample in samples) / count for d in dimensions)
    return Sample(x, sum(sample.y for sample in samples) / count)
