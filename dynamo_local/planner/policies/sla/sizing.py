"""How many engines a demand needs: the formulas of seed 002, on numbers.

    prefill:  requests × ISL / interval × min(1, p_corr)  /  tokens/s of an engine with prompts of that length
    decode:   requests × OSL / interval  /  the most tokens/s of an engine within ITL target / d_corr,
              at a context of ISL + OSL / 2

A correction factor is what was measured over what the profile expects. One for prefill above 1 means that prompts
waited for each other; it would not make an engine slower, and adds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.traffic import Traffic

_ROUNDING = 1e-9
"""So much of an engine is none: 3.0000000001 engines are three."""


class Estimated(Protocol):
    """A value of a profile, and whether it lies outside of what was measured."""

    @property
    def value(self) -> float:
        """Milliseconds, or tokens/s per GPU."""
        ...

    @property
    def extrapolated(self) -> bool:
        """Whether nothing as long, or as loaded, was measured."""
        ...


class Found(Estimated, Protocol):
    """The most that an engine does within a target."""

    @property
    def concurrency(self) -> float:
        """Requests that are in it then."""
        ...

    @property
    def itl_ms(self) -> float:
        """Its ITL then."""
        ...

    @property
    def attainable(self) -> bool:
        """False where a single request misses the target already."""
        ...


class PrefillModel(Protocol):
    """`profiles.PrefillInterpolator`."""

    def interpolate_ttft(self, isl: float) -> Estimated:
        """Milliseconds until the first token of a prompt that waits for nobody."""
        ...

    def interpolate_thpt_per_gpu(self, isl: float) -> Estimated:
        """Prompt tokens per second and GPU."""
        ...


class DecodeModel(Protocol):
    """`profiles.DecodeInterpolator`."""

    def interpolate_itl(self, concurrency: float, context_length: float) -> Estimated:
        """Milliseconds per token."""
        ...

    def find_best_throughput_per_gpu(self, itl: float, context_length: float) -> Found:
        """Tokens per second and GPU within that ITL (ms)."""
        ...


@dataclass(frozen=True, slots=True)
class Corrections:
    """Measured over expected: of TTFT (`prefill`) and of ITL (`decode`). 1: as the profile says, or not known."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """What one role has to do, and what one engine of it can.

    `tokens_per_request` of each request count as load (discounted already); `engine_tokens_per_s` is one engine's
    throughput, `expected_ms` its TTFT or ITL at that, against `target_ms` (for decode the corrected one).
    """

    tokens_per_request: float
    engine_tokens_per_s: float
    expected_ms: float
    target_ms: float
    attainable: bool
    extrapolated: bool

    def load(self, num_req: float, interval_s: float) -> float:
        """Tokens per second."""
        return num_req * self.tokens_per_request / interval_s

    def engines(self, num_req: float, interval_s: float) -> int:
        """The fewest engines that carry the load."""
        return max(0, math.ceil(self.load(num_req, interval_s) / self.engine_tokens_per_s - _ROUNDING))

    def requests_per_engine(self, interval_s: float) -> float:
        """So many requests in the interval keep one engine busy."""
        return self.engine_tokens_per_s * interval_s / max(self.tokens_per_request, 1e-12)

    def edge(self, num_req: float, interval_s: float) -> float:
        """The number of requests nearest to this one at which it takes one engine more, up to rounding."""
        one = self.requests_per_engine(interval_s)
        return one * (max(0, round(num_req / one)) + _ROUNDING)


def corrected(
    before: Corrections, traffic: Traffic, decode_workers: int, prefill: PrefillModel, decode: DecodeModel
) -> Corrections:
    """The factors after that window. One that cannot be computed stays as it was."""
    return Corrections(
        prefill=_of_prefill(traffic, prefill) or before.prefill,
        decode=_of_decode(traffic, decode_workers, decode) or before.decode,
    )


def _of_prefill(traffic: Traffic, prefill: PrefillModel) -> float | None:
    isl, ttft_ms = known(traffic.isl), known(traffic.ttft_ms)
    if not isl or not ttft_ms:
        return None
    return ttft_ms / prefill.interpolate_ttft(isl).value


def _of_decode(traffic: Traffic, workers: int, decode: DecodeModel) -> float | None:
    """By Little's law each engine holds rate × duration requests."""
    isl, osl, itl_ms = known(traffic.isl), known(traffic.osl), known(traffic.itl_ms)
    num_req, lasted_s = known(traffic.num_req), known(traffic.request_duration_s)
    if not isl or not itl_ms or not num_req or not lasted_s or osl is None or workers < 1 or traffic.duration_s <= 0:
        return None
    concurrency = num_req / workers * lasted_s / traffic.duration_s
    return itl_ms / decode.interpolate_itl(concurrency, isl + osl / 2).value


def known(value: float | Missing | None) -> float | None:
    """The measurement; None where there is none, or where it is no number from 0 on."""
    if value is None or isinstance(value, Missing) or not math.isfinite(value) or value < 0:
        return None
    return value


def prefill_need(next_isl: float, factor: float, ttft_ms: float, gpus: int, model: PrefillModel) -> Need:
    """For prompts of `next_isl` tokens, on engines of so many GPUs."""
    alone, thpt = model.interpolate_ttft(next_isl), model.interpolate_thpt_per_gpu(next_isl)
    return Need(
        tokens_per_request=next_isl * min(1.0, factor),
        engine_tokens_per_s=thpt.value * max(1, gpus),
        expected_ms=alone.value,
        target_ms=ttft_ms,
        attainable=alone.value <= ttft_ms,
        extrapolated=thpt.extrapolated,
    )


def decode_need(context: float, next_osl: float, factor: float, itl_ms: float, gpus: int, model: DecodeModel) -> Need:
    """For answers of `next_osl` tokens at a mean context of `context`, on engines of so many GPUs."""
    target_ms = itl_ms / (factor if factor > 0 else 1.0)
    best = model.find_best_throughput_per_gpu(target_ms, context)
    return Need(
        tokens_per_request=next_osl,
        engine_tokens_per_s=best.value * max(1, gpus),
        expected_ms=best.itl_ms,
        target_ms=target_ms,
        attainable=best.attainable,
        extrapolated=best.extrapolated,
    )


def complete(prediction: Prediction | None) -> tuple[float, float, float] | None:
    """Requests, ISL and OSL of a prediction that has all three; None otherwise."""
    if prediction is None:
        return None
    num_req, isl, osl = known(prediction.num_req), known(prediction.isl), known(prediction.osl)
    if num_req is None or not isl or not osl:
        return None
    return num_req, isl, osl
