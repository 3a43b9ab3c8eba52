"""VllmWorker: decodes, and prefills what is not sent away. The engine behind it is `ports.Engine`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from dynamo_local.components.engine_options import ENGINE, EngineConfig, start_observed_engine
from dynamo_local.components.handoffs import HANDOFF_TIMES, HandoffTimes
from dynamo_local.components.messages import GenerateRequest
from dynamo_local.components.models_view import ModelCard, engine_api, model_key_prefix
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.remote_prefill import DispatchCounts
from dynamo_local.components.targets import EngineTimes, TargetOptions, times_of
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.core.routing.estimates import DisaggPolicy, Timing
from dynamo_local.core.traffic import MAX_NUM_WAITING
from dynamo_local.core.types import Missing
from dynamo_local.errors import FlipFailed
from dynamo_local.sdk import service
from dynamo_local.sdk.context import FORMER_INSTANCE, WorkerContext, current_context
from dynamo_local.sdk.service import async_on_start, depends, endpoint, on_shutdown
from dynamo_local.system.executors import together
from dynamo_local.transport.kv_events import KvBlocksRequest

if TYPE_CHECKING:
    from dynamo_local.components.remote_prefill import RemotePrefill
    from dynamo_local.core.routing.prefill_choice import DecodeSide
    from dynamo_local.engines.vllm.options import Transfer

log = logging.getLogger(__name__)

_DEFAULT = DisaggSettings()


class VllmWorkerConfig(EngineConfig, TargetOptions):
    """Options of the `VllmWorker` service, and those of its engine."""

    max_num_waiting: int = Field(
        default=MAX_NUM_WAITING,
        ge=1,
        description="Requests waiting for the engine at which new ones are refused (429).",
    )
    kv_events: bool = Field(
        default=True, description="Say which KV blocks are cached; a Router with the policy kv needs it."
    )
    remote_prefill: bool = Field(default=False, description="Send prefills to the prefill workers.")
    disagg_policy: DisaggPolicy | None = Field(
        default=None,
        description="How it is decided which: slo, by what each way will cost (docs/routing.md), or threshold, by the "
        "options below. Default: slo where ttft or itl is given.",
    )
    conditional_disagg: bool = Field(default=False, description="Only those that the two thresholds below let through.")
    max_local_prefill_length: int = Field(
        default=_DEFAULT.max_local_prefill_length,
        ge=0,
        description="Uncached prompt tokens up to which a prefill stays local. Changeable at run time, in etcd.",
    )
    max_prefill_queue_size: int = Field(
        default=_DEFAULT.max_prefill_queue_size,
        ge=0,
        description="Queue length at which prefills stay local. Changeable at run time, in etcd.",
    )
    prefill_timeout_s: float = Field(
        default=15.0,
        gt=0,
        le=30,
        description="How long a request waits for its remote prefill. More than the queue's ack_wait of 5 s, so that "
        "another prefill worker can take over, and at most the KV's lease of 30 s.",
    )

    kv_pull_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="With vLLM: how long a request waits for the KV of its remote prefill, before a local prefill. "
        "Less than the lease of that KV (kv_lease_duration, 30 s).",
    )

    @property
    def kv_transfer(self) -> Transfer:
        return "consumer" if self.remote_prefill else "none"

    @property
    def wants_slo(self) -> bool:
        """Whether prefills go here or there by what that will cost."""
        return self.remote_prefill and (self.disagg_policy or ("slo" if self.targets.given else "threshold")) == "slo"

    def times(self) -> EngineTimes | Missing:
        return times_of(self.profile_results_dir, self.sim if self.engine_name == "sim" else None)

    def timing(self) -> Timing | Missing:
        """The times that its decisions are made from. Raises `ConfigError`."""
        times = self.times()
        return times if isinstance(times, Missing) else times.timing()

    def judging_timing(self) -> Timing | None:
        """The times that tell a wait from a prefill, where there are targets. Raises `ConfigError`."""
        timing = self.timing() if self.targets.given else None
        return None if isinstance(timing, Missing) else timing

    def what_slo_lacks(self) -> str | None:
        """Why `slo` cannot decide although it is wanted; None: it can, or it is not. Raises `ConfigError`."""
        if not self.wants_slo or not isinstance(timing := self.timing(), Missing):
            return None
        return f"disagg-policy slo decides as threshold: {timing.reason}"

    def more_vllm_options(self) -> dict[str, Any]:
        return {"kv_pull_timeout_s": self.kv_pull_timeout_s}


@service(dynamo={"namespace": "dynamo", "role": "decode"}, resources={"gpu": 1}, workers=1, config=VllmWorkerConfig)
class VllmWorker:
    """Decode worker of a disaggregated graph, or the whole worker of an aggregated one."""

    prefill_worker = depends(PrefillWorker, optional=True)

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()  # `stop` is also called after a start that was cut short
        self._counts = DispatchCounts()

    @async_on_start
    async def start(self) -> None:
        """Start the engine, then say that the model is served."""
        from dynamo_local.components.decode import DecodeService

        self._context = context = current_context()
        config: VllmWorkerConfig = context.settings
        self._kv_events = await context.kv_events() if config.kv_events else None
        self._engine = await start_observed_engine(config, context, self._kv_events, self._counts.numbers)
        if self._kv_events is not None:
            self._kv_events.block_size = self._engine.info.block_size
        self._remote, self._times = None, context.inherited.get(HANDOFF_TIMES) or HandoffTimes()
        if config.remote_prefill and self.prefill_worker is None:
            log.warning("remote-prefill is on, but the graph has no prefill worker: every prefill is local")
        elif config.remote_prefill:
            self._remote = await self._make_remote(context, config)
        if context.flips_to is not None:  # it may hold KV that it has computed as a prefill worker
            context.on_drain(self._engine.wait_handoffs)
        side = None if self._remote is None else self._remote.side
        self._decoder = DecodeService(
            self._engine,
            self._remote,
            config.max_num_waiting,
            side,
            counts=self._counts,
            times=self._times,
            timing=config.judging_timing(),
        )
        context.set_dispatch_source(self._counts.status)
        context.set_served_source(self._decoder.served.counters)
        context.set_load_source(self._engine.load, self._engine.load_changed)
        info = self._engine.info
        card = ModelCard(config.name, context.component, "generate", info.max_model_len, time.time(), engine_api(info))
        await context.register_key(model_key_prefix(context.namespace, config.name), card.encode())

    async def _make_remote(self, context: WorkerContext, config: VllmWorkerConfig) -> RemotePrefill:
        from dynamo_local.components.handoffs import EngineDirectory, dropped
        from dynamo_local.components.remote_prefill import RemotePrefill
        from dynamo_local.transport.settings import WatchedSettings, disagg_settings_key

        default = DisaggSettings(config.max_local_prefill_length, config.max_prefill_queue_size)
        settings = WatchedSettings(context.kv, disagg_settings_key(context.namespace, config.name), default)
        self._stack.push_async_callback(settings.close)
        prefill = self.prefill_worker.component
        _, workers, self._canaries, queue, replies = await together(
            settings.start(),
            context.endpoint_client(prefill, "status"),
            context.endpoint_client(prefill, "canary"),
            context.prefill_queue(config.prefill_queue),
            context.prefill_replies(),
        )
        self._directory = directory = EngineDirectory(context.kv, context.namespace, self._engine.info)
        self._stack.push_async_callback(directory.close)
        remote = RemotePrefill(
            queue,
            replies,
            settings=lambda: settings.current,
            prefill_workers=lambda: len(workers.instances()),
            conditional=config.conditional_disagg,
            timeout_s=config.prefill_timeout_s,
            check=directory.check,
            drop=partial(dropped, self._engine),
            side=self._side(config),
            counts=self._counts,
        )
        self._stack.push_async_callback(remote.finish)
        return remote

    def _side(self, config: VllmWorkerConfig) -> DecodeSide | None:
        from dynamo_local.core.routing.prefill_choice import DecodeSide

        if not config.wants_slo:
            return None
        timing = config.timing()
        if isinstance(timing, Missing):
            self._counts.lacking = True
            log.warning("disagg-policy slo decides as threshold: %s", timing.reason)
            return None
        info = self._engine.info
        return DecodeSide(
            timing,
            config.targets,
            max_kv_tokens=info.num_gpu_blocks * info.block_size,
            max_pass_tokens=info.max_num_batched_tokens,
        )

    @endpoint()
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Token ids in, token ids out; see `components.messages`."""
        async with contextlib.aclosing(self._decoder.generate(request)) as items:
            async for item in items:
                yield item

    @endpoint()
    async def kv_blocks(self, request: KvBlocksRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Which KV blocks are cached here, for a Router that has missed something; see `transport.kv_events`."""
        if self._kv_events is None:
            yield {"block_size": self._engine.info.block_size, "epoch": "-", "seq": 0, "replay": False}
            return
        async with contextlib.aclosing(self._kv_events.answer(request)) as items:
            async for item in items:
                yield item

    def hand_over(self) -> Mapping[str, Any]:
        return {ENGINE: self._engine, HANDOFF_TIMES: self._times}

    async def try_out(self) -> None:
        """See `sdk.context.Flippable`: a few tokens, prefilled by another worker and decoded here."""
        from dynamo_local.components.handoffs import Canary

        if self._remote is None:
            raise FlipFailed("remote-prefill is off: a prefill worker has nothing to become here")
        await Canary(
            self._engine,
            self._canaries,
            self._directory.check,
            times=self._times,
            itself=self._context.inherited.get(FORMER_INSTANCE),
        ).sing()

    async def settle(self) -> None:
        """See `sdk.context.Flippable`. All its work are its endpoints' streams."""

    @on_shutdown
    async def stop(self) -> None:
        """The streams have ended; take their last cancelled entries out of the queue. The engine is closed with the
        process."""
        await self._stack.aclose()
