"""What the engines really take, over what the profile says: learned from requests that ended. Pure.

* **Prefill.** Waiting only adds, so a low quantile of TTFT over the profile's is that of prompts that never waited.
* **Decode.** By Little's law the streams of the last answers were so many at once on each worker; their ITL is compared
  with what the profile says at that load.

A factor near 1 counts as 1: bursts alone make the comparison wrong by so much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.planner.queueing.engine import Passes
from dynamo_local.planner.values.requests import Ended

WINDOW_S = 60.0
ENDED_MIN = 30
LOW_QUANTILE = 0.1
DEAD_BAND = 0.2
STEP = 0.05
"""Factors go in such steps: each new one is a new question to the queueing twin."""
SLOWLY = 0.2
LEAST, MOST = 0.2, 8.0


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over expected, as they are learned (`raw`), and as they are used."""

    prefill_raw: float = 1.0
    decode_raw: float = 1.0

    @property
    def prefill(self) -> float:
        """Of prefill passes."""
        return _used(self.prefill_raw)

    @property
    def decode(self) -> float:
        """Of decode passes."""
        return _used(self.decode_raw)


def _used(raw: float) -> float:
    if abs(raw - 1) < DEAD_BAND:
        return 1.0
    return round(round(raw / STEP) * STEP, 6)


def learned(
    before: Factors, ended: Sequence[Ended], now_s: float, decode_workers: int, passes: Passes, batched: int
) -> Factors:
    """The factors after these answers (ascending), with so many decode workers serving."""
    recent = [each for each in ended if each.at_s > now_s - WINDOW_S]
    if len(recent) < ENDED_MIN:
        return before
    return Factors(
        _towards(before.prefill_raw, _prefill(recent[-200:], passes, batched)),
        _towards(before.decode_raw, _decode(recent, decode_workers, passes)),
    )


def _towards(before: float, ratio: float | None) -> float:
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return before
    return before + SLOWLY * (min(max(ratio, LEAST), MOST) - before)


def _prefill(recent: Sequence[Ended], passes: Passes, batched: int) -> float | None:
    ratios = []
    for each in recent:
        if each.ttft_s is not None and each.isl > 0:
            full, rest = divmod(each.isl, batched)
            alone_s = full * passes.ttft_s(batched) + (passes.ttft_s(rest) if rest else 0.0)
            ratios.append(each.ttft_s / (alone_s + (each.itl_s or 0.0)))
    if len(ratios) < ENDED_MIN:
        return None
    return sorted(ratios)[int(len(ratios) * LOW_QUANTILE)]


def _decode(recent: Sequence[Ended], workers: int, passes: Passes) -> float | None:
    told = [(each.itl_s, each.isl, each.osl) for each in recent if each.itl_s is not None and each.osl > 1]
    tokens = sum(osl - 1 for _, _, osl in told)
    if len(told) < ENDED_MIN or workers < 1 or tokens == 0:
        return None
    busy_s = sum(itl_s * (osl - 1) for itl_s, _, osl in told)
    context = sum((isl + osl / 2) * itl_s * (osl - 1) for itl_s, isl, osl in told) / max(busy_s, 1e-9)
    streams = max(1.0, busy_s / WINDOW_S / workers)
    return busy_s / tokens / passes.itl_s(int(streams * context), context)
