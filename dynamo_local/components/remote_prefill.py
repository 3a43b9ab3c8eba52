"""The decode side of a remote prefill: decide, enqueue, wait for the KV's identity, else go on alone.

Nothing that goes wrong here is the client's error: past the deadline, without NATS, without a prefill worker,
the request is prefilled locally and the client sees a pause. But a request of which prefill workers die one after the
other ends: it would take this worker along, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.core.routing.disagg import DisaggSettings, QueueView, SampledDepth, decide_prefill
from dynamo_local.core.routing.estimates import Prefills, Why
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.routing.prompts import Ask, Choice
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError, InfraUnavailable, KillsWorkers
from dynamo_local.ports import EngineRequest, PrefillQueue
from dynamo_local.sdk.context import PrefillReplies
from dynamo_local.system.executors import ended

# --- Counters of a worker's dispatch: decisions with their reasons, estimates, deferrals, refusals.


@dataclass(slots=True)
class DispatchCounts:
    """The counts of one decode worker. `fallbacks` are decisions that the thresholds made instead of `slo`, because
    there was no profile (`lacking`) or the queue's length was not known. `refused` are requests that it answered by
    429."""

    prefills: Prefills = field(default_factory=Prefills)
    fallbacks: int = 0
    refused: int = 0
    lacking: bool = False
    side: DecodeSide | None = None

    @property
    def remote(self) -> int:
        """Prompts that were sent away."""
        return self.prefills.count(remote=True)

    @property
    def local(self) -> int:
        """Prompts that were prefilled here, those that came back included."""
        return self.prefills.count(remote=False)

    def decided(self, *, remote: bool, why: Why, fallback: bool = False) -> None:
        """One more decision; `fallback`: the seed's rule made it for want of numbers."""
        self.prefills.decided(remote=remote, why=why)
        if fallback or self.lacking:
            self.fallbacks += 1

    def came_back(self) -> None:
        """A prompt that was sent away is prefilled here after all."""
        self.prefills.decided(remote=False, why=Why.CAME_BACK)

    def numbers(self) -> Mapping[str, float]:
        """As the worker's observations tell them."""
        return {
            "prefills_remote": self.remote,
            "prefills_local": self.local,
            "dispatch_fallbacks": self.fallbacks,
        }

    def status(self) -> Mapping[str, float]:
        """As `dynamo status` and `/metrics` show them: `NAME`, `NAME.WAY` or `NAME.WAY.WHY`; see
        `arbiter.metrics`."""
        found = {f"prefills.{way}.{why}": float(count) for (way, why), count in self.prefills.by.items()}
        found |= {"fallbacks": self.fallbacks, "refused": self.refused}
        if (side := self.side) is not None:
            for way, tokens in side.first_tokens.items():
                found |= tokens.numbers(way)
            found |= {
                "correction.local": side.local_correction.factor,
                "correction.remote": side.remote_correction.factor,
                "correction.itl": side.itl_correction.factor,
            }
        return found


log = logging.getLogger(__name__)

DEPTH_TIMEOUT_S = 0.5


class QueueGauge:
    """The prefill queue's `pending`, asked at most every `DEPTH_MAX_AGE_S` and by one request at a time."""

    def __init__(self, queue: PrefillQueue, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._depth = SampledDepth()
        self._refresh: asyncio.Task[None] | None = None

    def enqueued(self) -> None:
        """Count one entry more, until the next sample."""
        self._depth.enqueued()

    @property
    def known(self) -> int | Missing:
        """Entries waiting when somebody last asked."""
        return self._depth.pending

    async def pending(self) -> int | Missing:
        """Entries waiting, at most `DEPTH_MAX_AGE_S` old; `Missing` where the queue does not answer."""
        await self._fresh()
        return self._depth.pending

    async def view(self) -> QueueView | Missing:
        """The same, with what is unfinished."""
        await self._fresh()
        return self._depth.view

    async def _fresh(self) -> None:
        if self._depth.due(self._clock.now_s()):
            if self._refresh is None or self._refresh.done():
                self._refresh = asyncio.create_task(self._sample(), name="prefill queue depth")
            # Shielded: one caller's cancellation must not take the sample from the others.
            await asyncio.shield(self._refresh)

    async def close(self) -> None:
        """End a sample that is under way."""
        await ended(self._refresh)

    async def _sample(self) -> None:
        self._depth.asked()
        value: QueueView | Missing
        try:
            async with asyncio.timeout(DEPTH_TIMEOUT_S):
                depth = await self._queue.depth()
            value = QueueView(depth.pending, depth.outstanding, depth.late)
        except TimeoutError:
            value = Missing(f"no answer within {DEPTH_TIMEOUT_S} s")
        except InfraUnavailable as error:
            value = Missing(str(error))
        self._depth.sampled(value, self._clock.now_s())


class RemotePrefill:
    """Has prompts prefilled by prefill workers, where that pays. One per decode worker.

    `settings` gives the current thresholds, `prefill_workers` how many are registered, `timeout_s` bounds how long a
    request waits for its KV. `conditional=False` sends every prefill away. `check` raises `KvTransferError` for KV
    that cannot be used here. `drop` frees KV that came for a request whose client has left. With a `side` (`disagg-
    policy: slo`) it decides, and the thresholds do not count.
    """

    def __init__(
        self,
        queue: PrefillQueue,
        replies: PrefillReplies,
        *,
        settings: Callable[[], DisaggSettings],
        prefill_workers: Callable[[], int],
        conditional: bool,
        timeout_s: float,
        check: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None,
        drop: Callable[[EngineRequest, Mapping[str, Any]], Coroutine[Any, Any, None]] | None = None,
        clock: Clock | None = None,
        side: DecodeSide | None = None,
        counts: DispatchCounts | None = None,
    ) -> None:
        self.side = side
        self.counts = counts or DispatchCounts()
        self.counts.side = side
        self._queue = queue
        self._replies = replies
        self._settings = settings
        self._prefill_workers = prefill_workers
        self._conditional = conditional
        self._timeout_s = timeout_s
        self._check = check
        self._drop = drop
        self._clock = clock or AsyncioClock()
        self._gauge = QueueGauge(queue, self._clock)
        self._cancels: set[asyncio.Task[None]] = set()
        self.waiting = 0
        """Requests that wait for a remote prefill now."""
        self.prefilled: dict[str, tuple[float, str | None]] = {}
        """Seconds of a remote prefill, and its worker, by request. `DecodeService` takes an entry out."""

    async def prefill(self, request: EngineRequest, prefix_hit_rate: float) -> Mapping[str, Any] | None:
        """The `kv_transfer_params` for the decode engine, or None: prefill locally.

        Raises `KillsWorkers` if prefill workers were lost with it, one after the other.
        """
        choice = None
        if self.side is None:
            remote = await self._by_thresholds(request, prefix_hit_rate)
        else:
            choice = await self._by_costs(self.side, request, prefix_hit_rate)
            remote = choice.remote
        if not remote:
            return None
        self.waiting += 1
        settled = False
        try:
            cached_tokens = int(len(request.prompt_token_ids) * prefix_hit_rate)
            params = await self._away(request, choice, cached_tokens)
            settled = True
            return params
        except KillsWorkers:
            raise
        except DynamoError as error:
            log.warning("request %s is prefilled locally: %s", request.request_id, error)
            self.came_to_nothing(request)
            return None
        finally:
            self.waiting -= 1
            if not settled:  # also when the client went away
                self.abandon(request.request_id)

    async def _by_thresholds(self, request: EngineRequest, prefix_hit_rate: float) -> bool:
        # Asking the queue costs as much as a message of the hand-off: only where its answer counts.
        queue_size = await self._gauge.pending() if self._conditional else self._gauge.known
        decision = decide_prefill(
            prompt_length=len(request.prompt_token_ids),
            prefix_hit_rate=prefix_hit_rate,
            queue_size=queue_size,
            prefill_workers=self._prefill_workers(),
            settings=self._settings(),
            conditional=self._conditional,
        )
        log.info("request %s: %s", request.request_id, decision.reason)
        self.counts.decided(remote=decision.remote, why=Why.THRESHOLD)
        return decision.remote

    async def _by_costs(self, side: DecodeSide, request: EngineRequest, prefix_hit_rate: float) -> Choice:
        queue = await self._gauge.view()
        now_s, length = self._clock.now_s(), len(request.prompt_token_ids)
        ask = Ask(length, int(length * prefix_hit_rate), side.waited_s(request.request_id, now_s))
        choice = side.decide(ask, now_s, queue=queue, prefill_workers=self._prefill_workers())
        log.info("request %s: Remote prefill: %s (%s)", request.request_id, choice.remote, choice.reason)
        self.counts.decided(remote=choice.remote, why=choice.why, fallback=choice.fallback)
        side.follow(request.request_id, ask, choice, now_s)
        return choice

    async def _away(self, request: EngineRequest, choice: Choice | None, cached_tokens: int) -> Mapping[str, Any]:
        deadline_s = self._clock.now_s() + self._timeout_s
        with self._replies.expect(request.request_id) as expected:
            entry = messages.prefill_entry(request, self._replies.reply_to, cached_tokens)
            start_by_s = None if choice is None else choice.start_by_s
            start_within_s = None if start_by_s is None else start_by_s - self._clock.now_s()
            await self._queue.enqueue(
                request.request_id, entry, deadline_s=self._timeout_s, start_within_s=start_within_s
            )
            self._gauge.enqueued()
            try:
                reply = messages.parse_prefill_reply(await expected.wait(deadline_s - self._clock.now_s()))
                params = reply.kv_transfer_params
                if self._check is not None:
                    await self._check(params)
            except asyncio.CancelledError:
                if expected.taken is not None:
                    self._not_wanted(request, messages.parse_prefill_reply(expected.taken).kv_transfer_params)
                raise
        if reply.prefill_s is not None:
            self.prefilled[request.request_id] = reply.prefill_s, reply.worker
        if self.side is not None:
            self.side.handed_over(request.request_id, self._clock.now_s())
        return params

    def came_to_nothing(self, request: EngineRequest) -> None:
        """It is prefilled here after all."""
        self.counts.came_back()
        if self.side is not None:
            self.side.went_local(request.request_id, len(request.prompt_token_ids), self._clock.now_s())

    def abandon(self, request_id: str) -> None:
        """Take the entry out of the queue, in the background: the request must not wait for that."""
        self._in_background(self._cancel(request_id), f"cancel prefill {request_id}")

    def _not_wanted(self, request: EngineRequest, params: Mapping[str, Any]) -> None:
        if self._drop is not None:
            self._in_background(self._drop(request, params), f"drop the KV of {request.request_id}")

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._queue.cancel(request_id)
        except InfraUnavailable as error:
            log.warning("the prefill entry of %s stays until its deadline: %s", request_id, error)

    async def finish(self) -> None:
        """Return when no cancellation is under way. Each is bounded: by the queue's deadline, or by that of `drop`."""
        while self._cancels:
            await asyncio.wait(tuple(self._cancels))
        await self._gauge.close()
