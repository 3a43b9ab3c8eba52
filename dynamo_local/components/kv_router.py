"""One Router's work without the process around it: which worker gets a prompt."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.components.dispatcher import make_picker
from dynamo_local.core.routing.choice import NO_HITS, Picker, RouterPolicy, RouterSettings, Sample
from dynamo_local.core.routing.estimates import Costs
from dynamo_local.core.routing.kv_index import KvCost, KvIndex, hit_rates
from dynamo_local.errors import NoWorkers
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import EndpointClient

log = logging.getLogger(__name__)

FORGET_S = 10.0
"""A Router is not told of a request's end. After this the published loads, one a second, include the request."""


class RouteDecisions:
    """Answers route requests. `settings` gives the current policy, `block_sizes` each worker's tokens per block,
    `costs` what `slo` decides by."""

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
        costs: Costs | None = None,
    ) -> None:
        self._workers = workers
        self._loads = loads
        self._index = index
        self._block_sizes = block_sizes
        self._settings = settings
        self._seed = seed
        self._costs = costs
        self._clock = clock or AsyncioClock()
        self._pickers: dict[RouterPolicy, Picker] = {}
        self._sent: deque[tuple[float, Picker, int, str]] = deque()
        self._numbers = itertools.count()
        self.index_errors = 0

    def route(self, request: messages.RouteRequest) -> messages.RouteAnswer:
        """The worker that is to get this prompt. Raises `NoWorkers`."""
        avoid = set(request.avoid)
        candidates = [i.instance_id for i in self._workers.instances() if i.instance_id not in avoid]
        if not candidates:
            raise NoWorkers("no worker is registered that this request has not tried")
        policy = self._settings().router
        picker = self._picker(policy)
        hits = self._hits(request)
        loads = self._loads(candidates)
        if isinstance(picker, KvCost) and log.isEnabledFor(logging.DEBUG):
            for each, formula in picker.formulas(candidates, loads, hits).items():
                log.debug("Formula for %x: %s", each, formula)
        worker = picker.pick(candidates, loads, hits, len(request.token_ids))
        rate = hits.get(worker, 0.0)
        self._remember(picker, worker, request, rate)
        log.info("request %s: worker %x by %s, prefix hit rate %.3f", request.request_id, worker, policy, rate)
        return messages.RouteAnswer(worker, rate, policy)

    @property
    def num_remembered(self) -> int:
        """Requests that still count as sent: those of the last `FORGET_S` seconds."""
        return len(self._sent)

    def _picker(self, policy: RouterPolicy) -> Picker:
        if policy not in self._pickers:
            self._pickers[policy] = make_picker(policy, self._seed, hears_ends=False, costs=self._costs)
        return self._pickers[policy]

    def _hits(self, request: messages.RouteRequest) -> Mapping[int, float]:
        """Prefix hit rates by worker. An error here loses the prefix reuse, not the request."""
        try:
            sizes = self._block_sizes()
            rates: dict[int, float] = {}
            for size in set(sizes.values()) - {0}:  # usually one size; more only while workers are being replaced
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
            log.exception("request %s: the KV index failed, so load alone decides", request.request_id)
            return NO_HITS

    def _remember(self, picker: Picker, worker: int, request: messages.RouteRequest, rate: float) -> None:
        now_s = self._clock.now_s()
        tokens = request.max_tokens
        if isinstance(picker, KvCost):
            picker.block_size = max(self._block_sizes().values(), default=0)
            tokens = round(len(request.token_ids) * (1 - rate))
        number = str(next(self._numbers))  # a retried request counts as another one
        picker.routed(worker, number, tokens, now_s, len(request.token_ids))
        self._sent.append((now_s, picker, worker, number))
        while self._sent[0][0] < now_s - FORGET_S:
            _, old, its_worker, its_number = self._sent.popleft()
            old.finished(its_worker, its_number, now_s)
