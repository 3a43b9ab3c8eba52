"""Dynamo's cost function: what a worker has cached of the prompt, against how busy it is. Pure.

    2 × score × block_size / token_length − gpu_cache_usage_perc − num_requests_waiting / max over workers

`score` counts blocks matched in a row from the start, so the first term is twice the prefix hit rate. The last term is
0 where nobody waits. The highest value wins; ties are left to chance, which the caller brings along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.routing import NO_HITS, Sample, Sent, SentRequests
from dynamo_local.core.types import Load, Missing

PREFIX_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """How busy a worker is, with what was routed to it since its sample: `usage` is a share of its KV cache (above 1:
    more than it has), `waiting` counts requests."""

    usage: float
    waiting: int


def load_terms(load: Load, since: Sequence[Sent], kv_total_tokens: int = 0) -> LoadTerms | Missing:
    """A sample and the requests `since`; `Missing` where the sample does not say how much of the cache is used.

    `kv_total_tokens` turns the tokens of those requests into usage; 0: it is not known.
    """
    usage = load.gpu_cache_usage_perc
    if isinstance(usage, Missing):
        return usage
    coming = sum(sent.tokens for sent in since) / kv_total_tokens if since and kv_total_tokens else 0.0
    return LoadTerms(usage + coming, load.num_requests_waiting + len(since))


def hit_rates(matches: Mapping[int, int], block_size: int, token_length: int) -> dict[int, float]:
    """worker -> share (0..1) of a prompt of `token_length` tokens that its matched blocks hold."""
    if token_length < 1:
        return {}
    return {worker: min(1.0, score * block_size / token_length) for worker, score in matches.items()}


def kv_values(
    terms: Mapping[int, LoadTerms], hits: Mapping[int, float], prefix_weight: float = PREFIX_WEIGHT
) -> dict[int, float]:
    """worker -> the value of the cost function, for each worker of `terms`; `prefix_weight` 0: load alone."""
    most = max((term.waiting for term in terms.values()), default=0)
    return {
        worker: prefix_weight * hits.get(worker, 0.0) - term.usage - (term.waiting / most if most else 0.0)
        for worker, term in terms.items()
    }


class KvCost:
    """`core.routing.Picker` by the cost function; without `prefix` by its load terms alone (`kv-load`).

    `choose` picks one of several that are equally good. `block_size` (tokens; 0: not known) says how much of a cache
    the prompts of requests just routed will fill: `routed` gets their uncached tokens. A worker whose load is missing
    is not taken for idle: it counts as busy as the busiest known one, and at least as what is in flight from here.
    """

    def __init__(self, choose: Callable[[Sequence[int]], int], *, prefix: bool = True, block_size: int = 0) -> None:
        self.block_size = block_size
        self._choose = choose
        self._prefix_weight = PREFIX_WEIGHT if prefix else 0.0
        self._sent = SentRequests()

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        values = kv_values(self._terms(candidates, loads), hits, self._prefix_weight)
        best = max(values.values())
        ties = [worker for worker in sorted(values) if values[worker] == best]
        return ties[0] if len(ties) == 1 else self._choose(ties)

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        self._sent.routed(instance_id, request_id, tokens, now_s)

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        self._sent.finished(instance_id, request_id, now_s)

    def _terms(self, candidates: Sequence[int], loads: Mapping[int, Sample]) -> dict[int, LoadTerms]:
        known: dict[int, LoadTerms] = {}
        for worker in candidates:
            sample = loads.get(worker)
            if sample is not None and not isinstance(sample.load, Missing):
                since = self._sent.since(worker, sample.at_s)
                terms = load_terms(sample.load, since, sample.load.kv_total_blocks * self.block_size)
                if not isinstance(terms, Missing):
                    known[worker] = terms
        usage = max((term.usage for term in known.values()), default=0.0)
        waiting = max((term.waiting for term in known.values()), default=0)
        for worker in candidates:
            if worker not in known:
                known[worker] = LoadTerms(usage, max(waiting, len(self._sent.in_flight(worker))))
        return known
