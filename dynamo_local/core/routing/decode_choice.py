"""Which decode worker gets a request, by what that costs: the gap between its tokens there, and its prefill.

A worker's streams and KV come from its last load, and from what was sent to it since. The profile says by how much
one more stream lengthens its gap between tokens. The gaps that workers publish correct that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dynamo_local.core.routing.choice import NO_HITS, RoundRobin, Sample, SentRequests
from dynamo_local.core.routing.estimates import Correction, Targets, Timing, gap_above
from dynamo_local.core.routing.prefill_choice import WAIT_COST
from dynamo_local.core.types import Load, Missing

ANSWER_TOKENS = 256
"""For so many tokens one more request slows the others down, as far as is known when it comes."""
CONTEXTS = (1024.0, 8192.0)
"""Lengths of requests between which the plane is laid."""
LOW_SHARE, HIGH_SHARE = 0.1, 0.8
"""The KV cache in tokens."""
FULL_COST = 1.0
"""A worker that has no KV or no slot for it: the request misses its target there."""


@dataclass(frozen=True, slots=True)
class Busy:
    """A worker with what is on its way to it: requests, their tokens of KV, and how many requests find no slot."""

    requests: int
    kv_tokens: int
    overflow: int = 0


@dataclass(frozen=True, slots=True)
class EvenGap:
    """A gap between tokens that grows evenly: `base_s`, and something for each request and each token of KV."""

    base_s: float
    request_s: float
    token_s: float

    def itl_s(self, requests: int, kv_tokens: int) -> float:
        """Seconds per token."""
        return self.base_s + self.request_s * requests + self.token_s * kv_tokens


def even(timing: Timing) -> EvenGap:
    """The profile's decode surface as a plane. A measured one has steps, on which one worker would get everything up to
    the next step; a choice between workers needs their order, and that is the plane's."""
    most = timing.perf.max_kv_tokens

    def gap_s(share: float, context: float) -> float:
        kv_tokens = most * share
        return timing.itl_s(max(1, round(kv_tokens / context)), round(kv_tokens))

    slopes = [
        (gap_s(HIGH_SHARE, each) - gap_s(LOW_SHARE, each)) / (most * (HIGH_SHARE - LOW_SHARE)) for each in CONTEXTS
    ]
    # Along a line of equal context, a token of KV brings 1 / context of a request with it.
    request_s = max(0.0, (slopes[0] - slopes[1]) / (1 / CONTEXTS[0] - 1 / CONTEXTS[1]))
    token_s = max(0.0, slopes[1] - request_s / CONTEXTS[1])
    low = most * LOW_SHARE
    base_s = max(0.0, gap_s(LOW_SHARE, CONTEXTS[1]) - token_s * low - request_s * low / CONTEXTS[1])
    return EvenGap(base_s, request_s, token_s)


class SloPicker:
    """`core.routing.choice.Picker` by expected misses; see above.

    A worker whose load is missing is not taken for idle: it counts as the busiest known one, or as what is in flight
    from here, whichever is more.
    """

    def __init__(self, timing: Timing, targets: Targets, *, hears_ends: bool = True) -> None:
        self._timing = timing
        self._targets = targets
        self._hears_ends = hears_ends
        self._sent = SentRequests()
        self._prompts: dict[int, dict[str, int]] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._corrected_at_s: dict[int, float] = {}
        self._turn = RoundRobin()
        self._gap = even(timing)
        self.correction = Correction()

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        known = {i: busy for i in candidates if (busy := self._busy(i, loads.get(i))) is not None}
        requests = max((busy.requests for busy in known.values()), default=0)
        kv_tokens = max((busy.kv_tokens for busy in known.values()), default=0)
        overflow = max((busy.overflow for busy in known.values()), default=0)
        costs: dict[int, float] = {}
        prefills: dict[int, float] = {}
        for i in candidates:
            if (busy := known.get(i)) is None:
                own = self._own(i)
                busy = Busy(max(requests, own.requests), max(kv_tokens, own.kv_tokens), overflow)
            cached = int(hits.get(i, 0.0) * prompt_tokens)
            if cached not in prefills:
                prefills[cached] = self._timing.prefill_s(prompt_tokens, cached) if prompt_tokens else 0.0
            costs[i] = self.cost(busy, prompt_tokens, prefills[cached])
        best = min(costs.values())
        return self._turn.pick([i for i in candidates if costs[i] <= best], loads)

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        self._sent.routed(instance_id, request_id, tokens, now_s)
        self._prompts.setdefault(instance_id, {})[request_id] = prompt_tokens
        self._prompt_tokens[instance_id] = self._prompt_tokens.get(instance_id, 0) + prompt_tokens

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        self._sent.finished(instance_id, request_id, now_s)
        prompts = self._prompts.get(instance_id, {})
        gone = prompts.pop(request_id, None)
        if gone is not None:
            self._prompt_tokens[instance_id] -= gone
        if not prompts:
            self._prompts.pop(instance_id, None)
            self._prompt_tokens.pop(instance_id, None)
            self._corrected_at_s.pop(instance_id, None)

    def cost(self, busy: Busy, prompt_tokens: int, prefill_s: float) -> float:
        """The expected misses that a request of this many tokens brings to that worker: its own and those of the
        streams there. A little is added for the time that the request takes there: `prefill_s`, and its tokens."""
        requests, kv_tokens = busy.requests + 1, busy.kv_tokens + prompt_tokens
        itl_s = self._gap.itl_s(requests, kv_tokens) * self.correction.factor
        target_s = self._targets.itl_s
        misses = 0.0
        if target_s is not None and (misses := gap_above(itl_s, target_s)):
            before_s = self._gap.itl_s(busy.requests, busy.kv_tokens) * self.correction.factor
            misses += busy.requests * (misses - gap_above(before_s, target_s))
        if kv_tokens > self._timing.perf.max_kv_tokens:
            misses += FULL_COST
        misses += FULL_COST * busy.overflow
        return misses + WAIT_COST * (itl_s * ANSWER_TOKENS + prefill_s)

    def _own(self, instance_id: int) -> Busy:
        return Busy(len(self._prompts.get(instance_id, ())), self._prompt_tokens.get(instance_id, 0))

    def _busy(self, instance_id: int, sample: Sample | None) -> Busy | None:
        """The known state of a worker, or None if its load is missing."""
        if sample is None or isinstance(sample.load, Missing):
            return None
        load = sample.load
        since = self._sent.since(instance_id, sample.at_s)
        requests = load.request_active_slots + load.num_requests_waiting
        own = self._own(instance_id)
        if self._hears_ends:
            others = max(0, requests - self._sent.count_at(instance_id, sample.at_s))
            requests = others + own.requests
        else:
            requests += len(since)
        held = self._held_tokens(load)
        if isinstance(held, Missing):
            return None
        self._correct(instance_id, sample.at_s, load, held)
        newest_first = reversed(self._prompts.get(instance_id, {}).values())
        new = sum(islice(newest_first, len(since)))
        slots = load.request_total_slots
        overflow = max(0, requests + 1 - slots) if slots else 0
        return Busy(requests, max(held + new, own.kv_tokens), overflow)

    def _held_tokens(self, load: Load) -> int | Missing:
        usage = load.gpu_cache_usage_perc
        return usage if isinstance(usage, Missing) else int(usage * self._timing.perf.max_kv_tokens)

    def _correct(self, instance_id: int, at_s: float, load: Load, held_tokens: int) -> None:
        """Compare the profile with the gap that a worker has published, once for each of its loads."""
        if load.itl_ms is None or not load.request_active_slots or self._corrected_at_s.get(instance_id) == at_s:
            return
        self._corrected_at_s[instance_id] = at_s
        running = load.request_active_slots
        self.correction.seen(load.itl_ms / 1000, self._timing.itl_s(running, max(held_tokens, running)))
