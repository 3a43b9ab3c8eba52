"""A first model before there is traffic, from a worker's own benchmark or from a profile. Pure: plain numbers in. Each
model goes on learning from live passes in any case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dynamo_local.errors import BadInput
from dynamo_local.planner.models.pass_model import PassModel
from dynamo_local.planner.values.passes import EngineId, ForwardPass, Requests

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
