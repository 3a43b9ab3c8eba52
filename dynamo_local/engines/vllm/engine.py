"""vLLM behind `ports.Engine`: `AsyncLLM` in this process, EngineCore (and its workers) as its children.

The import and the start take tens of seconds and block, so both happen in a thread: the lease is kept alive meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
import zmq

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Load
from dynamo_local.engines.base import EngineBase, of_this_session
from dynamo_local.engines.sleep import EngineMemory
from dynamo_local.engines.vllm import engine_resources, plugin
from dynamo_local.engines.vllm import sleep as sleeping
from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.engines.vllm.kv_events import KvEventBridge, ZmqListener
from dynamo_local.engines.vllm.launcher import CoreProcesses
from dynamo_local.engines.vllm.options import KV_LEASE_S, VllmOptions
from dynamo_local.engines.vllm.pass_watch import ENDPOINT, EnginePasses
from dynamo_local.errors import ConfigError, EngineDead, EngineError, InvalidRequest, KvTransferError, how_to_install
from dynamo_local.ports import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvEventPublisher,
    PassSink,
    SamplingParams,
)
from dynamo_local.system import start_stages, tracing

# An engine's load, from vLLM's statistics and from the streams of this process, which are more recent. Pure.

HIT_RATE_REQUESTS = 1000
"""How many requests the prefix hit rate covers, as in vLLM's own log."""
ITL_WEIGHT = 0.1


@dataclass(slots=True)
class LiveRequest:
    """A running request: how many tokens may still come at most, and when the last ones came (loop's clock)."""

    remaining: int
    last_s: float | None = None


class Statistics:
    """Fed by a stat logger (`record`, after each pass) and by the streams (`opened`, `produced`, `closed`)."""

    def __init__(self, slots: int, blocks: int) -> None:
        self._slots = slots
        self._blocks = blocks
        self._live: dict[str, LiveRequest] = {}
        self._running = 0
        self._usage = 0.0
        self._queries: deque[tuple[int, int, int]] = deque()
        self._seen = [0, 0, 0]
        self._itl_s: float | None = None
        self.prompt_tokens: Counter[str] = Counter()
        """Prompt tokens by where their KV came from, under vLLM's names (`external_kv_transfer`, …)."""
        self.counters: dict[str, float] = {"prefix_queries": 0, "prefix_hits": 0}
        """See `ports.Engine.counters`."""

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> bool:
        """vLLM's `SchedulerStats` and `IterationStats` of one pass; either may be None. True if the load changed."""
        before = self._running, self._usage
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._usage = scheduler_stats.kv_cache_usage
            self._observe(scheduler_stats.prefix_cache_stats)
            self._count_drafts(getattr(scheduler_stats, "spec_decoding_stats", None))
        prompt_tokens = getattr(iteration_stats, "prompt_token_stats", None)
        if prompt_tokens is not None:
            self.prompt_tokens.update(
                local_compute=prompt_tokens.computed,
                local_cache_hit=prompt_tokens.local_cache_hit,
                external_kv_transfer=prompt_tokens.external_kv_transfer,
            )
        return before != (self._running, self._usage)

    def _observe(self, stats: Any) -> None:
        if stats is None or not stats.requests:
            return
        self.counters["prefix_queries"] += stats.queries
        self.counters["prefix_hits"] += stats.hits
        sample = (stats.requests, stats.queries, stats.hits)
        self._queries.append(sample)
        self._seen = [a + b for a, b in zip(self._seen, sample, strict=True)]
        while len(self._queries) > 1 and self._seen[0] > HIT_RATE_REQUESTS:
            self._seen = [a - b for a, b in zip(self._seen, self._queries.popleft(), strict=True)]

    def _count_drafts(self, stats: Any) -> None:
        """`SpecDecodingStats` of one pass; None where nothing was drafted."""
        if stats is not None:
            self.counters["drafts"] = self.counters.get("drafts", 0) + stats.num_drafts
            self.counters["accepted"] = self.counters.get("accepted", 0) + stats.num_accepted_tokens

    def opened(self, request_id: str, max_tokens: int) -> None:
        """A request was given to the engine."""
        self._live[request_id] = LiveRequest(max_tokens)

    def produced(self, request_id: str, tokens: int, now_s: float) -> None:
        """The request produced so many tokens."""
        live = self._live.get(request_id)
        if live is None or not tokens:
            return
        live.remaining = max(0, live.remaining - tokens)
        if live.last_s is not None:
            sample_s = (now_s - live.last_s) / tokens
            self._itl_s = sample_s if self._itl_s is None else self._itl_s + ITL_WEIGHT * (sample_s - self._itl_s)
        live.last_s = now_s

    def closed(self, request_id: str) -> None:
        """The request ended, for whatever reason."""
        self._live.pop(request_id, None)

    @property
    def num_live(self) -> int:
        """Requests that the engine has."""
        return len(self._live)

    def load(self, num_held: int) -> Load:
        """The current load. `num_held` requests have ended here, but their KV is kept for another engine.

        An engine without work makes no passes, so its last statistics of cache use may be out of date. Without running
        requests and held KV the use is 0.
        """
        live = len(self._live)
        running = min(self._running, live)
        usage = self._usage if live or num_held else 0.0
        _, queries, hits = self._seen
        return Load(
            request_active_slots=running,
            request_total_slots=self._slots,
            kv_active_blocks=round(usage * self._blocks),
            kv_total_blocks=self._blocks,
            num_requests_waiting=live - running,
            gpu_cache_usage_perc=usage,
            gpu_prefix_cache_hit_rate=hits / queries if queries else 0.0,
            remaining_tokens=sum(request.remaining for request in self._live.values()),
            itl_ms=None if self._itl_s is None else self._itl_s * 1000,
        )


# KV blocks that this engine holds for another one, as far as this side knows. Pure.
#
# vLLM keeps the blocks under a lease. The pulling engine renews the lease while its request waits. vLLM does not report
# the end of a pull. This code infers the end from the cache: no request runs here, and no block is in use.

REQUEST: Final = "remote_request_id"
"""Among the `kv_transfer_params`: vLLM's name of the request whose KV it is."""


class Handoffs:
    """Hand-offs of one engine, oldest first. `lease_s` is the connector's; times are monotonic seconds.

    The other side waits for less than a lease, and its last renewal lasts a lease: after two leases none is held.
    """

    def __init__(self, lease_s: float) -> None:
        self._kept_s = 2 * lease_s
        self._held: dict[str, float] = {}

    def add(self, params: Mapping[str, Any], now_s: float) -> None:
        """A request has ended, and its KV is kept for another engine, which will get these `kv_transfer_params`."""
        self._held[str(params.get(REQUEST))] = now_s + self._kept_s

    def forget(self, params: Mapping[str, Any]) -> None:
        """Nobody will pull it. (vLLM has no call to free it sooner than its lease does.)"""
        self._held.pop(str(params.get(REQUEST)), None)

    def observe(self, scheduler_stats: Any, num_live: int) -> bool:
        """Take vLLM's `SchedulerStats` of a pass (None: there were none). True if they show that all KV was pulled."""
        if not self._held or num_live or scheduler_stats is None or scheduler_stats.kv_cache_usage > 0.0:
            return False
        self._held.clear()
        return True

    def num_held(self, now_s: float) -> int:
        """How many may still be held."""
        for request_id in [name for name, until_s in self._held.items() if until_s <= now_s]:
            del self._held[request_id]
        return len(self._held)

    def seconds_left(self, now_s: float) -> float:
        """Seconds until the last of them is over at the latest; 0 if none is held."""
        return max(self._held.values()) - now_s if self.num_held(now_s) else 0.0


# The worker receives the passes that vLLM's schedulers report (`pass_watch`).

log = logging.getLogger(__name__)

_HERE = "dynamo_local.engines.vllm.watched_schedulers"

_decoder = msgspec.msgpack.Decoder(EnginePasses)


def watch_passes(config: Any) -> bool:
    """Replace the scheduler in vLLM's `VllmConfig` by a subclass that reports its passes.

    False: the section or the kind of model names another scheduler, which stays.
    """
    chosen = config.scheduler_config
    if chosen.scheduler_cls is not None:
        log.info("vLLM uses the scheduler %s: planners will know nothing of its passes", chosen.scheduler_cls)
        return False
    chosen.scheduler_cls = f"{_HERE}.{'WatchedAsyncScheduler' if chosen.async_scheduling else 'WatchedScheduler'}"
    return True


class PassBridge:
    """Records what comes, until it is closed. `endpoint` is bound here: several ranks send to it."""

    def __init__(self, endpoint: str, sink: PassSink) -> None:
        self.endpoint = endpoint
        self._sink = sink
        self._listener = ZmqListener(self._heard, "vLLM's passes")

    def start(self) -> None:
        """Listen. Call it before the engine starts."""
        self._listener.start(zmq.PULL, lambda socket: socket.bind(self.endpoint))

    def _heard(self, frames: Sequence[bytes]) -> None:
        try:
            received(frames[0], self._sink.record, asyncio.get_running_loop().time())
        except (msgspec.DecodeError, TypeError):
            log.exception("what vLLM's scheduler told cannot be read")

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()


def received(message: bytes, record: Callable[[ForwardPass], None], now_s: float) -> None:
    """Record the passes of one message that came at `now_s`. Raises `msgspec.DecodeError`."""
    received_passes = _decoder.decode(message)
    engine = EngineId("", received_passes.dp_rank)
    for one in received_passes.passes:
        scheduled, queued = Requests(*one.scheduled), Requests(*one.queued)
        record(ForwardPass(engine, one.counter_id, one.wall_time_s, scheduled, queued, now_s - one.age_s))


SHUTDOWN_TIMEOUT_S = 5.0
"""How long EngineCore may take to end by itself; then vLLM kills it. With NIXL it hangs in its teardown (15 s were not
enough on two busy cores), when nothing can be lost any more."""

PENALTIES = "vLLM's penalties count generated tokens, and those of the lost worker would be of the prompt"

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


def _trace_headers(llm: Any) -> dict[str, str] | None:
    """For vLLM's own spans, if its option `otlp-traces-endpoint` wants any: it warns of headers that it ignores."""
    observability = getattr(llm, "observability_config", None)
    return None if getattr(observability, "otlp_traces_endpoint", None) is None else tracing.carrier()


class VllmEngine(EngineBase):
    """An `Engine` that runs vLLM. `name` is the worker's: its ports and its cache folder follow from it. `kv_events`
    receives the events of the KV cache (without it `prefix_hit_rate` is not known), `passes` what its scheduler does.
    `processes` makes what starts, watches and ends vLLM's processes."""

    def __init__(
        self,
        options: VllmOptions,
        *,
        name: str | None = None,
        kv_events: KvEventPublisher | None = None,
        passes: PassSink | None = None,
        processes: Callable[[], CoreProcesses] = CoreProcesses,
    ) -> None:
        super().__init__()
        self._passes = passes
        self._pass_bridge: PassBridge | None = None
        self.options = options
        self._kv_events = kv_events
        self._bridge: KvEventBridge | None = None
        self._words = options.arguments()
        self._name = name or os.environ.get("DYN_WATCHER_NAME") or f"engine-{os.getpid()}"
        self._resources: engine_resources.EngineResources | None = None
        self._llm: Any = None
        self._sampling: Any = None
        self._core: Any = None
        self._statistics = Statistics(0, 0)
        self._handoffs = Handoffs(KV_LEASE_S)
        self._dead = asyncio.Event()
        self._closed = False
        self._new_processes = processes
        self._processes: CoreProcesses | None = None
        self._count = 0
        self._level = 1

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Import vLLM, load the model. Raises `ConfigError` for arguments, `EngineError` for what fails later."""
        if not is_installed():
            raise ConfigError(
                "the engine is vllm, which is not installed here; "
                f"{how_to_install('vllm')} (docs/vllm.md), or set engine: sim"
            )
        self._resources = engine_resources.take(self._name, dict(os.environ))
        os.environ.update(self._resources.environment)
        os.environ[plugin.WORKER_PID] = str(os.getpid())
        if os.environ.pop("VLLM_PORT", None) is not None:
            log.warning("VLLM_PORT is ignored: with several engines on one host each must find ports of its own")
        # We have threads and connections: a forked EngineCore would inherit half of them.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # EngineCore sets its process title. Without this, setproctitle would overwrite the environment, by which the
        # processes of a killed run are found.
        os.environ["SPT_NOENV"] = "1"
        if not self.options.gpus and self.options.transfer != "none":
            os.environ.setdefault(plugin.NIXL_PAUSE_US, "1000")
        self._listen_to_kv_events()
        self._listen_to_passes()
        started_s = time.monotonic()
        self._processes = self._new_processes()
        self._llm = await self._processes.build(self._build)
        start_stages.passed("EngineCore")
        if self._closed:
            await self.close()
            raise EngineError("the engine was closed while it started")
        self._processes.watch(self._die)
        self._tasks = await self._llm.get_supported_tasks()
        self._info = self._describe()
        log.info("vLLM was ready after %.1f s", time.monotonic() - started_s)

    def _listen_to_kv_events(self) -> None:
        """Listen if prefix caching is on, the section does not configure events itself, and there is one engine."""
        args = self.options.args
        assert self._resources is not None
        cached = args.get("enable_prefix_caching", True) and args.get("data_parallel_size", 1) == 1
        if self._kv_events is None or "kv_events_config" in args or not cached:
            return
        endpoint = f"ipc://{self._resources.folder / 'kv'}"
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}
        self._words += ["--kv-events-config", json.dumps(config)]
        self._bridge = KvEventBridge(endpoint, self._kv_events)
        self._bridge.start()

    def _listen_to_passes(self) -> None:
        if self._passes is not None and self._resources is not None:
            self._pass_bridge = PassBridge(f"ipc://{self._resources.folder / 'passes'}", self._passes)
            os.environ[ENDPOINT] = self._pass_bridge.endpoint
            self._pass_bridge.start()

    def _build(self) -> Any:
        """In a thread of its own."""
        import vllm
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from dynamo_local.engines.vllm.arguments import engine_args, stat_logger

        start_stages.passed("vLLM's imports")
        self._sampling = VllmSampling
        self._delta = RequestOutputKind.DELTA
        self._version = vllm.__version__
        args = engine_args(self._words)
        try:
            config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
            start_stages.passed("vLLM's configuration")
            if self._pass_bridge is not None:
                watch_passes(config)
            assert self._processes is not None
            assert self._resources is not None
            return AsyncLLM.from_vllm_config(
                config,
                client_addresses=self._processes.launch(config, self._resources.folder),
                usage_context=UsageContext.ENGINE_CONTEXT,
                stat_loggers=[stat_logger(self._recorded)],
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    def _describe(self) -> EngineInfo:
        config = self._llm.vllm_config
        transfer = config.kv_transfer_config
        extra = getattr(transfer, "kv_connector_extra_config", None) or {}
        self._handoffs = Handoffs(float(extra.get("kv_lease_duration", KV_LEASE_S)))
        blocks = int(config.cache_config.num_gpu_blocks or 0)
        slots = int(config.scheduler_config.max_num_seqs)
        self._statistics = Statistics(slots, blocks)
        assert self._resources is not None
        return EngineInfo(
            engine="vllm",
            engine_id=str(transfer.engine_id) if transfer is not None else str(uuid.uuid4()),
            model=self.options.model,
            max_model_len=int(config.model_config.max_model_len),
            block_size=int(config.cache_config.block_size),
            num_gpu_blocks=blocks,
            max_num_seqs=slots,
            options={"words": list(self._words), "tasks": list(self._tasks), "version": self._version},
            handoff_address=(self._resources.host, self._resources.port) if transfer is not None else None,
            max_num_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
            dp_size=int(config.parallel_config.data_parallel_size),
        )

    async def close(self) -> None:
        self._closed = True
        llm, self._llm = self._llm, None
        self._watch_no_more()
        if llm is not None:
            log.info("prompt tokens by source: %s", dict(self._statistics.prompt_tokens))
            handler = getattr(llm, "output_handler", None)
            if handler is not None and not self._statistics.num_live:
                handler.cancel()  # nobody awaits it: otherwise it logs that the engine has died
            assert self._processes is not None
            await asyncio.to_thread(self._processes.shutdown, llm, SHUTDOWN_TIMEOUT_S)
        if self._bridge is not None:
            await self._bridge.close()
        if self._pass_bridge is not None:
            await self._pass_bridge.close()
        if self._resources is not None:
            self._resources.close()
        self._dead.set()
        self._notify()

    def _watch_no_more(self) -> None:
        if self._processes is not None:
            self._processes.watch_no_more()

    def _die(self, why: str) -> None:
        if self._death is None and not self._closed:
            self._death = f"vLLM has ended by itself: {why}"
            log.error("%s", self._death)
            self._watch_no_more()
            self._dead.set()
            self._notify()

    # --- standby (engines.sleep.CanSleep) ----------------------------------------------------

    def cannot_sleep(self) -> str | None:
        return sleeping.cannot_sleep(self._alive(self._llm))

    async def sleep(self, level: int) -> None:
        await sleeping.sleep(self._alive(self._llm), level, self._kv_events)
        self._level = level

    async def wake(self) -> None:
        await sleeping.wake(self._alive(self._llm), self._level)

    async def renew_transfers(self) -> None:
        """Closes NIXL and opens it again, as a sleep and a wake do. Peers connect again by themselves."""
        llm = self._alive(self._llm)
        await sleeping.close_transfers(llm)
        await sleeping.open_transfers(llm)
        await llm.resume_generation()

    async def memory(self) -> EngineMemory:
        return await asyncio.to_thread(of_this_session)

    # --- requests ------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        llm = self._alive(self._llm)
        params = request.kv_transfer_params or {}
        if request.core is None:  # else vLLM's own checks have been made
            self._check(request)
        if request.sampling.extras is not None:
            raise InvalidRequest("tools, schemas, logprobs and rarer parameters do not go this way to the vllm engine")
        self._count += 1
        # An id may come twice (a redelivered prefill), but the engine needs unique ones.
        internal_id = f"{request.request_id}-{self._count:x}"
        if request.core is not None:
            outputs = self._core_requests(llm).run(request, internal_id, params, _trace_headers(llm))
        else:
            sampling = self._sampling_params(request.sampling, params)
            # With `type`, vLLM uses the prompt as it is; without, it would go through its renderer, in a thread.
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
            generating = llm.generate(prompt, sampling, internal_id, trace_headers=_trace_headers(llm))
            outputs = cast(AsyncGenerator[Any, None], generating)
        self._statistics.opened(internal_id, request.sampling.max_tokens)
        self._notify()
        try:
            async with contextlib.aclosing(self._bounded(outputs, request, params)) as bounded:
                async for output in bounded:
                    yield output
                    self._statistics.produced(internal_id, len(output.token_ids), time.monotonic())
        finally:
            self._statistics.closed(internal_id)
            self._notify()

    def why_not_continued(self, request: EngineRequest) -> str | None:
        if request.core is None and (request.sampling.presence_penalty or request.sampling.frequency_penalty):
            return PENALTIES
        return None

    def _core_requests(self, llm: Any) -> Any:
        from dynamo_local.engines.vllm.core_requests import CoreRequests

        if self._core is None:
            self._core = CoreRequests(llm)
        return self._core

    async def _bounded(
        self, outputs: AsyncGenerator[Any, None], request: EngineRequest, params: Mapping[str, Any]
    ) -> AsyncGenerator[EngineOutput, None]:
        """vLLM's outputs as ours. KV that is to be pulled must be here by a deadline: past its lease it is wrong KV."""
        pulls, limit_s = bool(params.get("do_remote_prefill")), self.options.kv_pull_timeout_s
        deadline_s = asyncio.get_running_loop().time() + limit_s if pulls else None
        started = False
        async with contextlib.aclosing(outputs):
            while True:
                try:
                    async with asyncio.timeout_at(None if started else deadline_s):
                        output = await anext(outputs)
                except TimeoutError:
                    raise self._not_pulled(request, f"it did not come within {limit_s:g} s") from None
                except StopAsyncIteration:
                    return
                except Exception as error:
                    raise self._translated(error, request) from error
                answer = self._converted(output)
                if answer.finish_reason == "error":
                    if pulls and not started:
                        raise self._not_pulled(request, "the connector could not load it")
                    raise EngineError(f"vLLM ended request {request.request_id} with an error; see the worker's log")
                started = started or bool(answer.token_ids)
                if answer.kv_transfer_params is not None:
                    self._handoffs.add(answer.kv_transfer_params, time.monotonic())
                yield answer
                if answer.finish_reason is not None:
                    return

    def _converted(self, output: Any) -> EngineOutput:
        if isinstance(output, EngineOutput):
            return output
        completion = output.outputs[0] if output.outputs else None
        reason = None if completion is None else completion.finish_reason
        return EngineOutput(
            token_ids=() if completion is None else tuple(completion.token_ids),
            finish_reason=None if reason is None else _REASONS.get(reason, "error"),
            num_cached_tokens=output.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _sampling_params(self, requested: SamplingParams, params: Mapping[str, Any]) -> Any:
        """vLLM's own. KV is handed over only by a request that ended by length: a prefill must not stop by itself."""
        hands_over = bool(params.get("do_remote_decode"))
        try:
            return self._sampling(
                max_tokens=requested.max_tokens,
                temperature=requested.temperature,
                top_p=requested.top_p,
                top_k=requested.top_k,
                seed=requested.seed,
                presence_penalty=requested.presence_penalty,
                frequency_penalty=requested.frequency_penalty,
                stop_token_ids=[] if hands_over else list(requested.stop_token_ids),
                ignore_eos=requested.ignore_eos or hands_over,
                min_tokens=requested.min_tokens,
                detokenize=False,
                output_kind=self._delta,
                extra_args={"kv_transfer_params": dict(params)} if params else None,
            )
        except ValueError as error:
            raise InvalidRequest(" ".join(str(error).split())) from error

    def _translated(self, error: Exception, request: EngineRequest) -> Exception:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError):
            self._die(str(error) or "EngineCore is dead")
            return EngineDead(self._death or str(error))
        cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
        text = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(cause, ValueError):
            return InvalidRequest(text)
        return EngineError(f"vLLM failed on request {request.request_id}: {type(cause).__name__}: {text}")

    def _not_pulled(self, request: EngineRequest, why: str) -> KvTransferError:
        params = request.kv_transfer_params or {}
        return KvTransferError(
            f"the KV of request {request.request_id} was not pulled from engine {params.get('remote_engine_id')} at "
            f"{params.get('remote_host')}:{params.get('remote_port')}: {why}; prefill it again",
            remote_request_id=params.get("remote_request_id"),
        )

    # --- what can be seen ----------------------------------------------------------------------

    def load(self) -> Load:
        return self._statistics.load(self._handoffs.num_held(time.monotonic()))

    def counters(self) -> Mapping[str, float]:
        return self._statistics.counters

    def prefix_hit_rate(self, prompt_token_ids: Sequence[int]) -> float:
        if self._bridge is None or self._info is None:
            return 0.0
        return self._bridge.blocks.hit_rate(prompt_token_ids, self._info.block_size)

    async def wait_failed(self) -> None:
        await self._dead.wait()
        if self._death is not None:
            raise EngineDead(self._death)

    async def wait_handoffs(self) -> None:
        if left_s := self._handoffs.seconds_left(time.monotonic()):
            log.info("KV of prefills may not have been pulled yet; waiting for at most %.1f s", left_s)
        while self._llm is not None and (left_s := self._handoffs.seconds_left(time.monotonic())) > 0:
            await self.changed_within(left_s)

    def release_handoff(self, params: Mapping[str, Any]) -> None:
        self._handoffs.forget(params)
        self._notify()

    def _recorded(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        changed = self._statistics.record(scheduler_stats, iteration_stats)
        changed |= self._handoffs.observe(scheduler_stats, self._statistics.num_live)
        if changed:  # an engine that holds KV for others reports a thousand times a second
            self._notify()
