"""PrefillWorker: computes the KV of prompts from the prefill queue.

`components.prefilling.prefill` says what is acked when.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pydantic import Field

from dynamo_local.components.engine_options import EngineConfig, start_observed_engine
from dynamo_local.ports import Engine
from dynamo_local.sdk import async_on_start, endpoint, on_shutdown, service
from dynamo_local.sdk.context import Work, current_context

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
        from dynamo_local.components.engine_directory import EngineCard, engine_key
        from dynamo_local.components.prefilling.prefill import Prefiller

        self._context = context = current_context()
        config: PrefillWorkerConfig = context.settings
        self._engine = await start_observed_engine(config, context)
        self._prefiller = Prefiller(
            self._engine,
            await context.prefill_queue(),
            await context.prefill_replies(),
            max_concurrent_prefills=config.max_concurrent_prefills,
        )
        card = EngineCard.of(self._engine.info, context.watcher_name)
        if card is not None:
            await context.register_whole_key(engine_key(context.namespace, card.engine_id), card.encode())
        context.set_load_source(self._engine.load, self._engine.load_changed)
        context.set_work_source(lambda: Work(self._prefiller.request_ids, self._prefiller.in_hand))
        context.vital(self._engine.wait_failed(), "the engine")
        context.on_drain(self._finished)
        context.on_resume(self._resumed)
        self._pull()

    def _pull(self) -> None:
        self._pulling = self._context.vital(self._prefiller.pull(self._context.draining), "pulling prefills")

    @endpoint()
    async def status(self, request: None = None) -> dict[str, Any]:
        """What this worker does. The endpoint also puts it into etcd, where decode workers count prefill workers."""
        counts = self._prefiller.counts
        return {
            "state": "draining" if self._context.draining.is_set() else "ready",
            "computing": self._prefiller.computing,
            "in_hand": self._prefiller.in_hand,
            "done": counts.done,
            "unwanted": counts.unwanted,
            "refused": counts.refused,
            "given_back": counts.given_back,
        }

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
        """End the engine; entries that are still in hand go back to the queue."""
        if self._pulling is not None:
            self._pulling.cancel()
            await self._until_pull_ended()
            await self._prefiller.give_back()
        if self._engine is not None:
            await self._engine.close()
