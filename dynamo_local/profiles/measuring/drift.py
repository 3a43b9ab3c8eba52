"""What engines that serve take, beside what the profile says of the same passes. Pure.

Pass by pass, so that no queue and no client is in it: only how many tokens a pass computed, and how long it took. Like
the trace that a fresh profile is checked by, it is compared in the median and at p90, of the last minutes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dynamo_local.core.passes import ForwardPass, Requests
from dynamo_local.profiles.interpolation import PerfModel
from dynamo_local.profiles.measuring.statistics import quantile

WINDOW_S = 300.0
PASSES_MIN = 50
"""Of fewer nothing is said."""
KEPT = 512
"""Passes of a component and kind."""
NOTED = 0.15
OVER = 0.10
"""Once it was noted, it is over below this: a drift at the bound is not told of again and again."""

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"


@dataclass(frozen=True, slots=True)
class Drifted:
    """A component's passes of one kind (`prefill`, `decode`, `mixed`): `p50` and `p90` are shares (0.2: a fifth longer
    than the profile says)."""

    component: str
    kind: str
    p50: float
    p90: float
    passes: int


def expected_s(model: PerfModel, scheduled: Requests) -> float:
    """What the profile says of a pass with these. Where it computes several prompts, they count as equally long."""
    prompts, decodes = scheduled.num_prefill_requests, scheduled.num_decode_requests
    took_s = 0.0
    if prompts:
        each, before = scheduled.sum_prefill_tokens / prompts, scheduled.sum_prefill_kv_tokens / prompts
        took_s = model.launch_s + prompts * model.prefill_s(round(before), round(each))
    if decodes:
        kv_tokens = scheduled.sum_decode_kv_tokens
        took_s += model.decode_s(decodes, kv_tokens, kv_tokens / decodes)
    return took_s


def kind_of(scheduled: Requests) -> str | None:
    """None: it computed nothing, or is not told what."""
    prefills, decodes = scheduled.sum_prefill_tokens > 0, scheduled.num_decode_requests > 0
    if prefills and decodes:
        return MIXED
    return PREFILL if prefills else DECODE if decodes else None


class Drift:
    """Fed with passes (`seen`), asked for figures. `noted` says of which a person was told."""

    def __init__(self, model: PerfModel) -> None:
        self._model = model
        self._pairs: dict[tuple[str, str], deque[tuple[float, float, float]]] = {}
        self.noted: frozenset[tuple[str, str]] = frozenset()

    def seen(self, component: str, passes: Iterable[ForwardPass]) -> None:
        """Those of one of its engines; heartbeats are left out."""
        for passed in passes:
            kind = kind_of(passed.scheduled)
            if passed.heartbeat or kind is None:
                continue
            expected = expected_s(self._model, passed.scheduled)
            if expected > 0 and math.isfinite(expected):
                pairs = self._pairs.setdefault((component, kind), deque(maxlen=KEPT))
                pairs.append((passed.at_s, passed.wall_time_s, expected))

    def figures(self, now_s: float) -> tuple[Drifted, ...]:
        """Of the last minutes, by component and kind."""
        return tuple(self._figures(now_s))

    def _figures(self, now_s: float) -> Iterator[Drifted]:
        for (component, kind), pairs in sorted(self._pairs.items()):
            lately = [(took, expected) for at_s, took, expected in pairs if at_s > now_s - WINDOW_S]
            if len(lately) >= PASSES_MIN:
                took, expected = zip(*lately, strict=True)
                p50, p90 = (quantile(took, share) / quantile(expected, share) - 1 for share in (0.5, 0.9))
                yield Drifted(component, kind, p50, p90, len(lately))

    def news(self, figures: Iterable[Drifted]) -> tuple[list[Drifted], list[Drifted]]:
        """Those that are too far off now and were not, and those that were and are not any more. Nothing is said of
        what has no figure: who serves nothing has not come back to its profile."""
        began, over = [], []
        for each in figures:
            key = (each.component, each.kind)
            if key not in self.noted and abs(each.p50) > NOTED:
                began.append(each)
                self.noted |= {key}
            elif key in self.noted and abs(each.p50) < OVER:
                over.append(each)
                self.noted -= {key}
        return began, over


def words(each: Drifted) -> str:
    """`VllmWorker decode +18 % (p90 +25 %, of 512 passes)`"""
    return f"{each.component} {each.kind} {each.p50:+.0%} (p90 {each.p90:+.0%}, of {each.passes} passes)"
