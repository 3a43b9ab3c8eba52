"""What follows from how long a pass takes: the next request's TTFT, the ITL at a load, an engine's capacity.

Durations are in seconds, lengths in tokens. Each function needs a model that is ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dynamo_local.planner.models.pass_model import PassModel
from dynamo_local.planner.values.passes import Capabilities

MAX_HIT_RATE = 0.95
"""Some of each prompt is always computed."""

MAX_BATCHES = 128
"""So many batch sizes are tried for a capacity."""


class Limits(NamedTuple):
    """An engine's limits. The defaults are Dynamo's, for engines that do not tell theirs."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_kv_tokens: int = 2_000_000


USUAL = Limits()


def limits_of(told: Capabilities | None) -> Limits:
    """What an engine told, the defaults for the rest."""
    if told is None:
        return USUAL
    return Limits(
        told.max_num_batched_tokens or USUAL.max_num_batched_tokens,
        told.max_num_seqs or USUAL.max_num_seqs,
        told.max_kv_tokens or USUAL.max_kv_tokens,
    )


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine for estimates: its model, its limits, and what of the traffic changes the work it has.

    `hit_rate` (0..1) discounts prompts only; `accept_length` is the tokens per decode pass, 1 without speculation.
    """

    model: PassModel
    limits: Limits = USUAL
    hit_rate: float = 0.0
    accept_length: float = 1.0

    @property
    def computed_share(self) -> float:
        """Of a prompt: what the cache does not have."""
        return 1.0 - min(MAX_HIT_RATE, max(0.0, self.hit_rate))


def ttft_s(engine: Engine, queued_tokens: float, *, decode_requests: float = 0, decode_kv: float = 0) -> float:
    """Of the next request, behind so many tokens of queued prompts: passes of `max_num_batched_tokens` and a last one.
    In an aggregated engine the decode rides along in each of them. The next prompt is as long as the last 64 were
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
    """Of a prefill engine, for prompts of this mean length (above 0)."""
    tokens = isl * engine.computed_share
    limits = engine.limits
    most = max(1, min(limits.max_num_seqs, int(limits.max_num_batched_tokens // tokens)))

    def tried(batch: int) -> tuple[float, bool]:
        took_s = _prefill_s(engine, batch * tokens, limits.max_num_batched_tokens, 0, 0)
        return batch / took_s, took_s <= ttft_target_s

    return _best(most, tried)


def decode_capacity(engine: Engine, *, isl: float, osl: float, itl_target_s: float) -> Capacity:
    """Of a decode engine. A request holds its whole prompt (a hit saves computing, not memory) and half its answer."""
    context = max(1.0, isl + osl // 2)

    def tried(batch: int) -> tuple[float, bool]:
        one_s = engine.model.pass_s(decode_requests=batch, decode_kv=batch * context) / engine.accept_length
        return batch / (max(1.0, osl) * one_s), one_s <= itl_target_s

    return _best(_fit(engine, context), tried)


def agg_capacity(engine: Engine, *, isl: float, osl: float, ttft_target_s: float, itl_target_s: float) -> Capacity:
    """Of an aggregated engine in balance: each pass also prefills for as many requests as end in it."""
    context, tokens = max(1.0, isl + osl // 2), isl * engine.computed_share
    batched, answer = engine.limits.max_num_batched_tokens, max(1.0, osl)

    def prefilled(batch: int) -> int:
        return math.ceil(batch * engine.accept_length * tokens / answer)

    def tried(batch: int) -> tuple[float, bool]:
        kv, room = batch * context, max(1, batched - batch)
        one_s = engine.model.pass_s(prefill_tokens=min(prefilled(batch), room), decode_requests=batch, decode_kv=kv)
        itl, ttft = one_s / engine.accept_length, _prefill_s(engine, tokens, room, batch, kv)
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


def _prefill_s(engine: Engine, tokens: float, room: int, decode_requests: float, decode_kv: float) -> float:
    """Passes of `room` tokens and a last one."""
    if tokens <= 0:
        return 0.0
    full, tail = divmod(tokens, room)
    model, took_s = engine.model, 0.0
    if full:
        whole_s = model.pass_s(prefill_tokens=room, decode_requests=decode_requests, decode_kv=decode_kv)
        took_s += full * whole_s
    if tail > 0:
        took_s += model.pass_s(prefill_tokens=tail, decode_requests=decode_requests, decode_kv=decode_kv)
    return took_s
