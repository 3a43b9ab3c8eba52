"""One Router's work without the process around it, and a Processor's questions to it."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import wire
from dynamo_local.components.picker import make_picker
from dynamo_local.core.kv_index import KvIndex
from dynamo_local.core.kv_routing import KvCost, hit_rates
from dynamo_local.core.routing import NO_HITS, Picker, RouterPolicy, RouterSettings, Sample
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError, NoWorkers
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import EndpointClient
from dynamo_local.runtime.load import LoadView

log = logging.getLogger(__name__)

FORGET_S = 10.0
"""A Router does not hear of a request's end. Loads are published once a second, so after this nobody depends on it."""

AWAY_S = 2.0
"""After a Router that did not answer in time, requests are routed without it for so long: one wait, not one each."""


def samples(view: LoadView, clock: Clock, instance_ids: Sequence[int]) -> dict[int, Sample]:
    """The view's loads as the pickers take them: a missing one stays missing."""
    now_s = clock.now_s()
    found: dict[int, Sample] = {}
    for instance_id in instance_ids:
        report = view.get(instance_id)
        if isinstance(report, Missing):
            found[instance_id] = Sample(report, now_s)
        else:
            found[instance_id] = Sample(report.load, now_s - report.age_s)
    return found


class RouteMaker:
    """Answers route requests. `settings` gives the policy of now, `block_sizes` the tokens per block of each worker."""

    def __init__(
        self,
        workers: EndpointClient,
        loads: Callable[[Sequence[int]], Mapping[int, Sample]],
        index: KvIndex,
        block_sizes: Callable[[], Mapping[int, int]],
        settings: Callable[[], RouterSettings],
        *,
        seed: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._workers = workers
        self._loads = loads
        self._index = index
        self._block_sizes = block_sizes
        self._settings = settings
        self._seed = seed
        self._clock = clock or AsyncioClock()
        self._pickers: dict[RouterPolicy, Picker] = {}
        self._sent: deque[tuple[float, Picker, int, str]] = deque()
        self._numbers = itertools.count()
        self.index_errors = 0

    def route(self, request: wire.RouteRequest) -> wire.RouteAnswer:
        """The worker that is to get this prompt. Raises `NoWorkers`."""
        avoid = set(request.avoid)
        candidates = [i.instance_id for i in self._workers.instances() if i.instance_id not in avoid]
        if not candidates:
            raise NoWorkers("no worker is registered that this request has not tried")
        policy = self._settings().router
        picker = self._picker(policy)
        hits = self._hits(request)
        worker = picker.pick(candidates, self._loads(candidates), hits)
        rate = hits.get(worker, 0.0)
        self._remember(picker, worker, request, rate)
        log.info("request %s: worker %x by %s, prefix hit rate %.3f", request.request_id, worker, policy, rate)
        return wire.RouteAnswer(worker, rate, policy)

    def _picker(self, policy: RouterPolicy) -> Picker:
        if policy not in self._pickers:
            self._pickers[policy] = make_picker(policy, self._seed)
        return self._pickers[policy]

    def _hits(self, request: wire.RouteRequest) -> Mapping[int, float]:
        """Prefix hit rates. Whatever fails here costs the prefix, not the request."""
        try:
            sizes = self._block_sizes()
            rates: dict[int, float] = {}
            for size in set(sizes.values()) - {0}:  # one, but while workers are replaced by others
                hashes = block_hashes(request.token_ids, size, lora_id=request.lora_id)
                rates |= hit_rates(
                    {
                        worker: score
                        for worker, score in self._index.find_matches(hashes, self._clock.now_s()).items()
                        if sizes.get(worker) == size
                    },
                    size,
                    len(request.token_ids),
                )
            return rates
        except Exception:  # an index error means empty scores, never a failed request
            self.index_errors += 1
            log.exception("request %s: the KV index failed; it is routed by load alone", request.request_id)
            return NO_HITS

    def _remember(self, picker: Picker, worker: int, request: wire.RouteRequest, rate: float) -> None:
        now_s = self._clock.now_s()
        tokens = request.max_tokens
        if isinstance(picker, KvCost):
            picker.block_size = max(self._block_sizes().values(), default=0)
            tokens = round(len(request.token_ids) * (1 - rate))
        number = str(next(self._numbers))  # a request that is tried again is another one
        picker.routed(worker, number, tokens, now_s)
        self._sent.append((now_s, picker, worker, number))
        while self._sent[0][0] < now_s - FORGET_S:
            _, old, its_worker, its_number = self._sent.popleft()
            old.finished(its_worker, its_number)


@dataclass(frozen=True, slots=True)
class Routed:
    """A worker for a request; `prefix_hit_rate` None where nobody knows it."""

    worker: int
    prefix_hit_rate: float | None = None


class RouterLink:
    """Asks a Router for workers. Where it is away, or slow, the answer is None: then the Processor picks by itself."""

    def __init__(self, client: EndpointClient, timeout_s: float, clock: Clock | None = None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock or AsyncioClock()
        self._away_until_s = float("-inf")
        self._away = False

    async def choose(
        self, token_ids: Sequence[int], request_id: str, tokens: int, avoid: Sequence[int]
    ) -> Routed | None:
        """Within `timeout_s`. Raises nothing of its own."""
        if self._clock.now_s() < self._away_until_s:
            return None
        request = {"token_ids": token_ids, "request_id": request_id, "max_tokens": tokens, "avoid": list(avoid)}
        began_s = self._clock.now_s()
        try:
            stream = await self._client.call(request, request_id=request_id, timeout_s=self._timeout_s)
            try:
                answers = [item async for item in stream]
            finally:
                await stream.aclose()
            answer = msgspec.convert(answers[0], wire.RouteAnswer)
        except (DynamoError, msgspec.ValidationError, IndexError) as error:
            now_s = self._clock.now_s()
            if now_s - began_s >= self._timeout_s / 2:
                self._away_until_s = now_s + AWAY_S
            if not self._away:
                log.warning("the Router gives no answer, workers are picked here until it does: %s", error)
            self._away = True
            return None
        if self._away:
            log.info("the Router answers again")
        self._away = False
        return Routed(answer.worker_id, answer.prefix_hit_rate)
