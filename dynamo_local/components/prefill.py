"""One PrefillWorker's work without the process around it.

It takes prompts from the prefill queue, computes their KV, and hands it to the worker that decodes.

An entry is acked once the decode worker has *confirmed* the reply with the KV's identity. Until then a crash has the
entry delivered to another prefill worker after `ack_wait`. From then on the decode worker knows the source of the
KV, and prefills locally at once if the pull fails. Waiting for the pull itself would make that recovery slower, not
safer. A draining worker waits for the pulls (`engine.wait_handoffs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, cast

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.components.handoffs import HandoffTimes
from dynamo_local.core.routing.disagg import ASK_PREFILL
from dynamo_local.core.served import Served
from dynamo_local.errors import DynamoError, EngineError, InfraUnavailable, InvalidRequest, RequestCancelled, WorkerLost
from dynamo_local.ports import Engine, EngineOutput, EngineRequest, PrefillQueue, PulledTask
from dynamo_local.sdk.context import PrefillReplies
from dynamo_local.system import tracing
from dynamo_local.system.executors import ended
from dynamo_local.system.request_log import bound
from dynamo_local.transport.prefill_queue import keep_in_progress

log = logging.getLogger(__name__)

PULL_TIMEOUT_S = 30.0
RETRY_PAUSE_S = 1.0
NAK_DELAY_S = 0.2


@dataclass(slots=True)
class PrefillCounts:
    """The fate of the entries that this worker pulled."""

    done: int = 0
    unwanted: int = 0
    refused: int = 0
    given_back: int = 0
    recomputed_tokens: int = 0
    """Prompt tokens that were computed here although the decode worker had their KV. vLLM's connector moves KV from
    the prefill worker to the decode worker alone, so the remote rule subtracts what only a local prefill saves."""


class Prefiller:
    """Pulls and serves entries: `pull` until told to stop, then `finish`; or `pull` again, if the stop is taken back.

    An entry is pulled only when a pass is free; the next may be pulled while the decode side takes over the KV.
    """

    def __init__(
        self,
        engine: Engine,
        queue: PrefillQueue,
        replies: PrefillReplies,
        *,
        max_concurrent_prefills: int = 1,
        times: HandoffTimes | None = None,
        clock: Clock | None = None,
        name: str | None = None,
    ) -> None:
        self._name = name
        self._times = times or HandoffTimes()
        self._clock = clock or AsyncioClock()
        self._engine = engine
        self._queue = queue
        self._replies = replies
        self._free_passes = asyncio.Semaphore(max_concurrent_prefills)
        self._serving: dict[asyncio.Task[None], str] = {}
        self.computing = 0
        self.counts = PrefillCounts()
        self.served = Served()
        """Its tokens are those of the prompts, its times to first token those of the engine."""

    @property
    def in_hand(self) -> int:
        """Entries pulled and not yet finished, hand-offs included."""
        return len(self._serving)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the entries in hand."""
        return tuple(self._serving.values())

    async def pull(self, stop: asyncio.Event) -> None:
        """Pull until `stop` has been set, even if it was cleared at once. Work in hand goes on."""
        stopped = asyncio.create_task(stop.wait(), name="prefill stop")
        pulling = asyncio.create_task(self._pull_on(stop), name="pulling prefills")
        try:
            await asyncio.wait((stopped, pulling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(stopped, pulling)

    async def finish(self) -> None:
        """Return when nothing is in hand and all KV was taken over. Cancelled, it leaves everything going on."""
        if self._serving:
            log.info("finishing %d prefills first: %s", self.in_hand, ", ".join(self.request_ids))
        await self.finish_entries()
        await self._engine.wait_handoffs()

    async def finish_entries(self) -> None:
        """Return when nothing is in hand; KV that was handed out may still be held."""
        while self._serving:
            await asyncio.wait(tuple(self._serving))

    async def give_back(self) -> None:
        """Give the entries in hand back to the queue, for another worker. Returns when the queue has confirmed."""
        for task in self._serving:
            task.cancel()
        while self._serving:
            await asyncio.wait(tuple(self._serving))

    async def _pull_on(self, stop: asyncio.Event) -> None:
        """Wait for a free pass, then for an entry, again and again. Cancelled, it leaves no entry behind."""
        while True:
            await self._free_passes.acquire()
            pulled: PulledTask | None = None
            try:
                if stop.is_set():  # even a pull that is cancelled at once may take an entry
                    return
                pulled = await self._queue.pull(PULL_TIMEOUT_S)
            except InfraUnavailable as error:
                log.warning("no prefills until the queue answers: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
            except Exception:  # a loop that ends would leave a registered worker that does nothing
                log.exception("pulling from the prefill queue failed unexpectedly; trying again")
                await asyncio.sleep(RETRY_PAUSE_S)
            finally:
                if pulled is None:
                    self._free_passes.release()
            if pulled is None:
                await asyncio.sleep(0)  # a pull may end without having waited, and the loop runs others, too
            else:
                task = asyncio.create_task(self._serve(pulled), name=f"prefill {pulled.task.request_id}")
                self._serving[task] = pulled.task.request_id
                task.add_done_callback(self._serving.pop)

    async def _serve(self, pulled: PulledTask) -> None:
        """One entry to its end. Nothing is raised: every outcome is an answer to the queue, or a log line."""
        task = pulled.task
        with bound(task.x_request_id), tracing.continued(task.trace):
            if task.queued_at_s is not None:
                tracing.past("queue", task.queued_at_s, {"dynamo.queue.attempt": task.attempt})
            await self._serve_bound(pulled)

    async def _serve_bound(self, pulled: PulledTask) -> None:
        request_id = pulled.task.request_id
        try:
            async with keep_in_progress(pulled, self._queue.ack_wait_s):
                try:
                    with tracing.span("prefill"):
                        entry, result = await self._compute(pulled)
                finally:
                    self._free_passes.release()
                await self._reply(pulled, entry, result)
            await pulled.ack()
            log.info("prefill %s is over", request_id)
        except InfraUnavailable as error:
            # It may or may not have arrived. The queue delivers it again, and a second reply is refused as unwanted.
            log.warning("prefill %s is left to the queue's redelivery: %s", request_id, error)
        except asyncio.CancelledError:
            await self._give_back(pulled, "the worker is going away")
            raise
        except DynamoError as error:
            await self._give_back(pulled, str(error))
        except Exception:  # a defect of ours or the engine's must not end the loop that serves the others
            log.exception("prefill %s failed unexpectedly", request_id)
            await self._give_back(pulled, "an unexpected failure")

    async def _compute(self, pulled: PulledTask) -> tuple[messages.PrefillEntry | None, Any]:
        """The entry and its reply; the reply is an exception if another attempt would fail, too. No entry: nobody waits
        for a reply."""
        self.computing += 1
        entry: messages.PrefillEntry | None = None
        began_s = self._clock.now_s()
        try:
            entry = messages.parse_prefill_entry(pulled.task.payload)
            if not await self._replies.begin(entry.reply_to, pulled.task.request_id):
                self.counts.unwanted += 1
                log.info("prefill %s is not computed: its decode worker is gone", pulled.task.request_id)
                return None, None
            # A redelivered entry may come to a worker that still computes the first delivery.
            request_id = f"{pulled.task.request_id}-{pulled.task.attempt}"
            sampling = replace(entry.sampling, max_tokens=1, min_tokens=0)
            request = EngineRequest(request_id, entry.token_ids, sampling, dict(ASK_PREFILL), generated=entry.generated)
            last: EngineOutput | None = None
            outputs = cast(AsyncGenerator[EngineOutput, None], self._engine.generate(request))
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    last = output
            if last is None or last.finish_reason in (None, "error", "abort"):
                raise EngineError(f"the prefill of {pulled.task.request_id} ended without a result")
            prefill_s = self._clock.now_s() - began_s
            self._times.prefills.append(prefill_s)
            self.served.first(prefill_s, len(entry.token_ids))
            self.served.ended()
            self.counts.recomputed_tokens += max(0, entry.cached_tokens - (last.num_cached_tokens or 0))
            return entry, {**messages.prefill_reply(last), "prefill_s": prefill_s, "worker": self._name}
        except InvalidRequest as error:
            return entry, error
        finally:
            self.computing -= 1

    async def _reply(self, pulled: PulledTask, entry: messages.PrefillEntry | None, result: Any) -> None:
        request_id = pulled.task.request_id
        if isinstance(result, InvalidRequest):
            self.counts.refused += 1
            log.warning("prefill %s cannot be done by anybody: %s", request_id, result)
        if entry is None:
            return  # of an unreadable one the address is not known; the requester's deadline ends its wait
        try:
            await self._replies.send_reply(entry.reply_to, request_id, result)
        except (WorkerLost, RequestCancelled) as error:
            # Nobody will pull the KV. Nobody needs the entry any more, so it is acked.
            if not isinstance(result, InvalidRequest):
                self._engine.release_handoff(result["kv_transfer_params"])
            self.counts.unwanted += 1
            log.info("prefill %s: %s", request_id, error)
            return
        if not isinstance(result, InvalidRequest):
            self.counts.done += 1

    async def _give_back(self, pulled: PulledTask, why: str) -> None:
        self.counts.given_back += 1
        if isinstance(reply_to := pulled.task.payload.get("reply_to"), str):
            self._replies.give_back(reply_to, pulled.task.request_id)
        log.warning("prefill %s (attempt %d) is given back: %s", pulled.task.request_id, pulled.task.attempt, why)
        try:
            await pulled.nak(NAK_DELAY_S * pulled.task.attempt)
        except InfraUnavailable as error:
            log.warning("prefill %s is left to the queue's redelivery: %s", pulled.task.request_id, error)
