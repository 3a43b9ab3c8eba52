"""PrefillWorker: computes the KV of prompts from the prefill queue.

`components.prefill` says what is acked when.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from dynamo_local.components.engine_options import ENGINE, EngineConfig, start_observed_engine
from dynamo_local.components.handoffs import HANDOFF_TIMES, HandoffTimes
from dynamo_local.components.messages import CanaryRequest
from dynamo_local.ports import Engine
from dynamo_local.sdk import service
from dynamo_local.sdk.context import Work, current_context
from dynamo_local.sdk.service import async_on_start, endpoint, on_shutdown
from dynamo_local.system.executors import together

if TYPE_CHECKING:
    from dynamo_local.engines.vllm.options import Transfer


class PrefillWorkerConfig(EngineConfig):
    """Options of the `PrefillWorker` service, and those of its engine."""

    max_concurrent_prefills: int = Field(
        default=1, ge=1, description="Entries computed at once. More share a pass: more throughput, longer waits."
    )

    @property
    def kv_transfer(self) -> Transfer:
        return "producer"


@service(dynamo={"namespace": "dynamo", "role": "prefill"}, resources={"gpu": 1}, workers=1, config=PrefillWorkerConfig)
class PrefillWorker:
    """Prefill worker of a disaggregated graph. Its only work comes through the prefill queue."""

    def __init__(self) -> None:
        self._engine: Engine | None = None  # `stop` is also called after a start that was cut short
        self._pulling: asyncio.Task[None] | None = None

    @async_on_start
    async def start(self) -> None:
        """Start the engine, then pull."""
        from dynamo_local.components.handoffs import EngineCard, engine_key
        from dynamo_local.components.prefill import Prefiller

        self._context = context = current_context()
        config: PrefillWorkerConfig = context.settings
        # A worker that decodes later is asked by Routers for all that it has cached, also from before.
        kv_events = await context.kv_events() if context.flips_to is not None else None
        self._engine = await start_observed_engine(config, context, kv_events)
        if kv_events is not None:
            kv_events.block_size = self._engine.info.block_size
        self._times = context.inherited.get(HANDOFF_TIMES) or HandoffTimes()
        queue, replies = await together(context.prefill_queue(config.prefill_queue), context.prefill_replies())
        self._prefiller = Prefiller(
            self._engine,
            queue,
            replies,
            max_concurrent_prefills=config.max_concurrent_prefills,
            times=self._times,
            name=context.watcher_name,
        )
        card = EngineCard.of(self._engine.info, context.watcher_name)
        if card is not None:
            await context.register_whole_key(engine_key(context.namespace, card.engine_id), card.encode())
        context.set_load_source(self._engine.load, self._engine.load_changed)
        context.set_dispatch_source(lambda: {"deferred": queue.deferred, "late_prefills": queue.late_pulled})
        context.set_served_source(self._prefiller.served.counters)
        context.set_work_source(lambda: Work(self._prefiller.request_ids, self._prefiller.in_hand))
        context.on_drain(self._finished)
        context.on_resume(self._resumed)
        self._pull()

    def _pull(self) -> None:
        self._pulling = self._context.vital(self._prefiller.pull(self._context.draining), "pulling prefills")

    @endpoint()
    async def status(self, request: None = None) -> dict[str, Any]:
        """This worker's activity. The endpoint also puts it into etcd, where decode workers count prefill workers."""
        counts = self._prefiller.counts
        return {
            "state": "draining" if self._context.draining.is_set() else "ready",
            "computing": self._prefiller.computing,
            "in_hand": self._prefiller.in_hand,
            "done": counts.done,
            "unwanted": counts.unwanted,
            "refused": counts.refused,
            "given_back": counts.given_back,
            "recomputed_tokens": counts.recomputed_tokens,
        }

    @endpoint()
    async def canary(self, request: CanaryRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The KV of a few tokens, at once: for a worker that tries out whether it can decode what is prefilled here."""
        from dynamo_local.components.handoffs import prefilled

        assert self._engine is not None
        yield await prefilled(self._engine, request)

    def hand_over(self) -> Mapping[str, Any]:
        return {ENGINE: self._engine, HANDOFF_TIMES: self._times}

    async def try_out(self) -> None:
        """See `sdk.context.Flippable`. It pulls already; an entry that fails goes back to the queue."""

    async def settle(self) -> None:
        """See `sdk.context.Flippable`. KV that nobody has pulled yet stays in the engine, which goes on."""
        await self._until_pull_ended()
        await self._prefiller.finish_entries()

    async def _finished(self) -> None:
        """Return when the pulled entries are finished and their KV has been pulled."""
        await self._until_pull_ended()
        await self._prefiller.finish()

    async def _resumed(self) -> None:
        """The drain was taken back: pull again. Entries in hand have gone on meanwhile."""
        await self._until_pull_ended()
        self._pull()

    async def _until_pull_ended(self) -> None:
        if self._pulling is not None:
            await asyncio.wait([self._pulling])

    @on_shutdown
    async def stop(self) -> None:
        """Entries that are still in hand go back to the queue; the engine is closed with the process."""
        if self._pulling is not None:
            self._pulling.cancel()
            await self._until_pull_ended()
            await self._prefiller.give_back()
