"""The simulated engine behind `ports.Engine`: an asyncio shell around the pure `SimScheduler`.

One task sleeps to the end of the current pass, by the scheduler's own times: if it wakes late it catches up, and
nothing drifts. Under a virtual-time loop (`clock.run_virtual`) the same code runs as fast as it can."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.routing.kv_events import AllBlocksCleared, KvEvent
from dynamo_local.core.types import Load
from dynamo_local.engines.base import EngineBase
from dynamo_local.engines.sim.facts import load_of, shape_of
from dynamo_local.engines.sim.options import INSTANT_S, SimOptions, answer_of, faults_here
from dynamo_local.engines.sim.requests import Event, Finished, HandoffExpired, PullReady, SimRequest, Started, Tokens
from dynamo_local.engines.sim.scheduler import PassDone, SimScheduler
from dynamo_local.engines.sim.tokens import OutputKeys, plan_output, prompt_digest
from dynamo_local.engines.sim.transfers import (
    KvListener,
    KvTransfers,
    KvTransport,
    LoopbackTransport,
    OutputStream,
    kv_transfer_params,
    pull_request_of,
)
from dynamo_local.engines.sleep import EngineMemory
from dynamo_local.errors import EngineDead, EngineError, InvalidRequest
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import EngineInfo, EngineOutput, EngineRequest, KvEventPublisher, PassSink
from dynamo_local.profile.interpolation import PerfModel, ProfileModel
from dynamo_local.system.executors import ended

# --- Reports the simulated engine's passes to a sink, and a heartbeat in each second without one.

HEARTBEAT_S = 1.0

Passing = tuple[Requests, Requests]
"""The requests of the current pass, and the queued ones."""


class EnginePasses:
    """`watch` is the scheduler's; `look` brings the scheduler to now, and says what it computes (None: it has none)."""

    def __init__(self, sink: PassSink, clock: Clock, look: Callable[[], Passing | None]) -> None:
        self.watch: list[PassDone] = []
        self._sink = sink
        self._clock = clock
        self._look = look
        self._count = 0
        self._last_s = clock.now_s()
        sink.refresh = self._refresh

    def tell(self) -> None:
        """The passes that have ended since the last call."""
        for done in self.watch:
            self._record(done.end_s, done.wall_time_s, done.scheduled, done.queued)
        self.watch.clear()

    async def beat(self) -> None:
        """For ever: a heartbeat after each second without a pass."""
        while True:
            await self._clock.sleep_until(self._last_s + HEARTBEAT_S)
            passing, now_s = self._look(), self._clock.now_s()
            if now_s - self._last_s < HEARTBEAT_S:
                continue
            if passing is None:
                return
            self._record(now_s, 0.0, *passing)

    def _refresh(self) -> None:
        self._look()

    def _record(self, at_s: float, wall_time_s: float, scheduled: Requests, queued: Requests) -> None:
        self._count += 1
        self._last_s = at_s
        self._sink.record(ForwardPass(EngineId(""), self._count, wall_time_s, scheduled, queued, at_s))


# --- The simulated engine's sleep: its options give the time and the memory.

SIM_MEMORY_BYTES = 80 * 1024**3
"""Memory of a simulated device (`system.gpus`). An awake engine takes `SIM_SHARE` of it."""
SIM_SHARE = 0.9


class SimSleep:
    """Whether it sleeps, and what that costs. `wakes` counts those so far, the rehearsal's included."""

    def __init__(self, options: SimOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self.level: int | None = None
        self.wakes = 0

    @property
    def asleep(self) -> bool:
        """It takes no requests."""
        return self.level is not None

    @property
    def corrupted(self) -> bool:
        """From now on it answers otherwise than before (`corrupt_after_wakes`)."""
        after = self._options.corrupt_after_wakes
        return after is not None and self.wakes >= after

    async def sleep(self, level: int) -> None:
        """Takes `sleep_s / speed`."""
        self.level = level
        await self._clock.sleep_until(self._clock.now_s() + self._options.sleep_s / self._options.speed)

    async def wake(self) -> None:
        """Takes `wake_s / speed`, or `wake_level2_s / speed` where the weights are read again."""
        if self.level is None:
            raise EngineError("the engine does not sleep")
        wake_s = self._options.wake_s if self.level == 1 else self._options.wake_level2_s
        await self._clock.sleep_until(self._clock.now_s() + wake_s / self._options.speed)
        self.level = None
        self.wakes += 1

    def memory(self) -> EngineMemory:
        """On a device of its own, that is only simulated."""
        options, grown = self._options, self._options.sleep_growth_bytes * self.wakes
        if self.level is None:
            return EngineMemory(int(SIM_SHARE * SIM_MEMORY_BYTES), grown)
        host = options.sleep_host_bytes if self.level == 1 else 0
        return EngineMemory(options.sleep_residue_bytes + grown, host + grown)


logger = logging.getLogger(__name__)


class SimEngine(EngineBase):
    """An `Engine` that schedules like vLLM, takes a profile's time, and computes `tokens.expected_output`.

    `transport` defaults to a loopback side channel of its own; engines on a virtual clock share an `InMemoryTransport`.
    `perf_model` defaults to the profile that the options name. `kv_events` receives the events of its KV cache,
    `passes` its passes.
    """

    def __init__(
        self,
        options: SimOptions | None = None,
        *,
        clock: Clock | None = None,
        transport: KvTransport | None = None,
        perf_model: PerfModel | None = None,
        kv_events: KvEventPublisher | None = None,
        passes: PassSink | None = None,
    ) -> None:
        super().__init__()
        self._kv_events = kv_events
        self._journal: list[KvEvent] | None = None if kv_events is None else []
        self.options = options or SimOptions()
        self._clock = clock or AsyncioClock()
        self._transport = transport or LoopbackTransport()
        self._perf_model = perf_model
        self._engine_id = self.options.engine_id or str(uuid.uuid4())
        self._scheduler: SimScheduler | None = None
        self._listener: KvListener | None = None
        self._streams: dict[str, OutputStream] = {}
        self._transfers = KvTransfers(
            self._engine_id,
            self.options,
            self._clock,
            self._transport,
            scheduler=lambda: self._scheduler,
            pump=self._pump,
            kick=self._kick,
            changed=self._notify,
        )
        self._sleep = SimSleep(self.options, self._clock)
        self._told = None if passes is None else EnginePasses(passes, self._clock, self._passing)
        self._beat: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._timer_at_s: float | None = None
        self._kicked = False
        self._turn_s = 0.0
        self._over = asyncio.Event()
        self._count = 0
        self._queried = self._found = 0
        """Prompt tokens that were looked up in the cache, and found."""

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the profile, open the side channel, and take `start_up_s / speed` in all. Raises `ConfigError`."""
        ready_at_s = self._clock.now_s() + self.options.start_up_s / self.options.speed
        perf = self._perf_model or ProfileModel.load(self.options.profile)
        config, max_model_len = shape_of(self.options, perf, faults_here(self.options, ready_at_s))
        self._listener = await self._transport.serve(self._transfers)
        await self._clock.sleep_until(ready_at_s)
        self._scheduler = SimScheduler(config, perf, self._journal, None if self._told is None else self._told.watch)
        if self._told is not None:
            self._beat = asyncio.create_task(self._told.beat(), name=f"heartbeats of sim-engine-{self._engine_id}")
        self._info = EngineInfo(
            engine="sim",
            engine_id=self._engine_id,
            model=self.options.model,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_gpu_blocks=config.num_gpu_blocks,
            max_num_seqs=config.max_num_seqs,
            options=dataclasses.asdict(self.options),
            handoff_address=(self._listener.host, self._listener.port),
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    async def close(self) -> None:
        if self._scheduler is not None and self._kv_events is not None:
            self._kv_events.publish((AllBlocksCleared(),))
        self._scheduler = None
        self._over.set()
        for stream in self._streams.values():
            stream.reason = stream.reason or "abort"
            stream.wake()
        await self._transfers.told()
        await ended(self._timer, self._beat, *self._transfers.tasks())
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        self._notify()

    # --- standby (engines.sleeping.CanSleep) -------------------------------------------------

    probe_tokens = 2  # its answers depend on the prompt and the seed alone

    def cannot_sleep(self) -> None:
        return None

    async def sleep(self, level: int) -> None:
        if not self.reset_prefix_cache():
            raise EngineError("the engine cannot sleep while requests hold KV blocks")
        await self._sleep.sleep(level)

    async def wake(self) -> None:
        self._alive(self._scheduler)
        await self._sleep.wake()

    async def memory(self) -> EngineMemory:
        return self._sleep.memory()

    # --- requests ------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        internal_id, stream = self._submit(request)
        try:
            while True:
                if not stream.pending and stream.reason is None and stream.error is None:
                    stream.waiter = asyncio.get_running_loop().create_future()
                    await stream.waiter
                    stream.waiter = None
                if stream.error is not None:
                    raise stream.error
                count, stream.pending = stream.pending, 0
                token_ids = stream.tokens.take(stream.first, count)
                numbers = {} if stream.request.sampling.extras is None else stream.numbers(stream.first, token_ids)
                stream.first += count
                reason = stream.reason
                stream.delivered = reason is not None
                handoff = kv_transfer_params(self._engine_id, self._listener, stream.handoff)
                yield EngineOutput(token_ids, reason, stream.cached, handoff, **numbers)
                if reason is not None:
                    return
        finally:
            self._forget(internal_id)

    def _submit(self, request: EngineRequest) -> tuple[str, OutputStream]:
        """Check, plan and queue a request. Raises `InvalidRequest`, `KvTransferError` or `EngineError`."""
        scheduler = self._alive(self._scheduler)
        prompt, sampling, options = request.prompt_token_ids, request.sampling, self.options
        self._check(request)
        if self._sleep.asleep:
            raise EngineError("the engine sleeps; wake it first")
        try:
            own = prompt[: len(prompt) - request.generated]
            digest = prompt_digest(own, seed=options.seed + self._sleep.corrupted)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"the prompt holds something that is no token id: {error}", param="prompt") from error
        tokens, natural = answer_of(digest, sampling, options, request.generated)
        params = request.kv_transfer_params or {}
        hold = bool(params.get("do_remote_decode"))
        pull = pull_request_of(params, request.request_id, digest) if params.get("do_remote_prefill") else None
        most = min(sampling.max_tokens, self.info.max_model_len - len(prompt))
        count, reason = plan_output(
            tokens,
            natural=natural,
            max_tokens=most,
            # vLLM hands KV over only from a request that ended by length: a prefill engine must not stop by itself.
            ignore_eos=sampling.ignore_eos or hold,
            min_tokens=sampling.min_tokens,
            stop_token_ids=() if hold else sampling.stop_token_ids,
        )
        self._kick()
        self._count += 1
        internal_id = f"{request.request_id}-{self._count:x}"
        keys = block_hashes(prompt, options.block_size)
        scheduler.submit(
            SimRequest(
                internal_id,
                len(prompt),
                count,
                finish_reason=reason,
                max_output_tokens=most,
                block_keys=keys,
                output_keys=OutputKeys(prompt, tokens, keys, options.block_size),
                hold_kv=hold,
                pull_kv=pull is not None,
            ),
            self._now_s(),
        )
        stream = self._streams[internal_id] = OutputStream(request, tokens, pull)
        if hold:
            self._transfers.hold(internal_id, digest.hex())
        if self._count == options.fail_after_requests:
            self._fail(RuntimeError(f"its option fail_after_requests is {self._count}"))
        return internal_id, stream

    def _forget(self, internal_id: str) -> None:
        """The stream's consumer has left: if the request still runs, end it and free its blocks."""
        stream = self._streams.pop(internal_id)
        if stream.delivered:
            return
        self._transfers.forget(internal_id, stream)
        if self._scheduler is not None:
            self._scheduler.abort(internal_id, self._now_s())
            # Finished, but nobody was told of the hand-off, so nobody can pull it.
            self._scheduler.release(internal_id, self._now_s())
            self._kick()

    # --- what can be seen ----------------------------------------------------------------------

    def load(self) -> Load:
        """The current load; all zero before `start` and after `close`."""
        scheduler = self._scheduler
        if scheduler is None:
            return Load()
        self._pump()
        return load_of(scheduler)

    @property
    def passes(self) -> int:
        """Forward passes so far; 0 before the start."""
        return 0 if self._scheduler is None else self._scheduler.passes

    @property
    def preemptions(self) -> int:
        """Sequences so far that lost their blocks to others and were computed again."""
        return 0 if self._scheduler is None else self._scheduler.preemptions

    @property
    def num_held(self) -> int:
        """Prompts whose KV waits for another engine to pull it."""
        return 0 if self._scheduler is None else self._scheduler.num_held

    def prefix_hit_rate(self, prompt_token_ids: Sequence[int]) -> float:
        if self._scheduler is None or not prompt_token_ids:
            return 0.0
        self._pump()
        keys = block_hashes(prompt_token_ids, self.options.block_size)
        return self._scheduler.matched_tokens(keys) / len(prompt_token_ids)

    def counters(self) -> Mapping[str, float]:
        counted = {"prefix_queries": self._queried, "prefix_hits": self._found}
        if self._scheduler is not None and self.options.accept_length > 1:
            counted |= {"drafts": self._scheduler.drafts, "accepted": self._scheduler.accepted}
        return counted

    def _passing(self) -> Passing | None:
        """The current pass. None before the start and after the end."""
        self._pump()
        return None if self._scheduler is None else self._scheduler.passing()

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False while requests hold blocks (as vLLM's)."""
        done = self._alive(self._scheduler).reset_prefix_cache(self._now_s())
        self._tell_kv_events()
        return done

    async def wait_failed(self) -> None:
        if self._scheduler is not None:
            await self._over.wait()
        if self._death is not None:
            raise EngineDead(self._death)

    async def wait_handoffs(self) -> None:
        while self._scheduler is not None and self._scheduler.num_held:
            await self.load_changed()

    def release_handoff(self, params: Mapping[str, Any]) -> None:
        self._transfers.release(params)

    # --- time ----------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Update the schedule after all that is ready in this turn of the loop is submitted: one pass takes it all."""
        if not self._kicked:
            self._turn_s = self._clock.now_s()
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._kick_now)

    def _now_s(self) -> float:
        """The time of this turn of the loop: all requests of one turn arrive at the same instant."""
        return self._turn_s if self._kicked else self._clock.now_s()

    def _kick_now(self) -> None:
        self._kicked = False
        try:
            at_s = self._pump()
        except Exception as error:
            # Nobody would see an exception of a loop callback, so every stream gets it.
            self._fail(error)
            return
        if at_s is None:
            return
        if self._timer is not None and not self._timer.done():
            if self._timer_at_s is not None and self._timer_at_s <= at_s:
                return
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = asyncio.get_running_loop().create_task(self._run(at_s), name=f"sim-engine-{self._engine_id}")
        self._timer.add_done_callback(self._timer_done)

    async def _run(self, at_s: float | None) -> None:
        """Sleep from event to event until there is none."""
        while at_s is not None:
            self._timer_at_s = at_s
            await self._clock.sleep_until(at_s)
            # A clock may wake a rounding error early; the schedule's own time is the truth.
            at_s = self._pump(at_s)

    def _timer_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End every stream with the error (a bug, or one of the performance model): none may wait for ever."""
        logger.error("the simulated engine failed", exc_info=error)
        self._scheduler = None
        self._over.set()
        self._death = f"the simulated engine failed: {type(error).__name__}: {error}"
        for stream in self._streams.values():
            stream.error = EngineDead(self._death)
            stream.wake()
        self._notify()

    def _pump(self, due_s: float = -math.inf) -> float | None:
        """Advance the schedule to now and pass its events on. Returns when to do so again."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        # The schedule may be ahead of the clock by short passes.
        now_s = max(self._now_s(), due_s, scheduler.now_s)
        ahead = False
        while True:
            events = scheduler.advance(now_s)
            if events:
                self._dispatch(events)
            self._tell_kv_events()
            if self._told is not None:
                self._told.tell()
            at_s = scheduler.next_event_at(quiet=self.options.coalesce_passes)
            if at_s is None:
                return None
            if at_s > now_s:
                if ahead or at_s - now_s > INSTANT_S:
                    return at_s
                now_s, ahead = at_s, True  # once per call: others have their turn, too

    def _dispatch(self, events: list[Event]) -> None:
        streams = self._streams
        for event in events:
            stream = streams.get(event.request_id)
            if isinstance(event, Tokens):
                if stream is not None:
                    stream.pending += len(event.times_s)
                    stream.wake()
            elif isinstance(event, HandoffExpired):
                self._transfers.expired(event.request_id)
            elif stream is None:
                continue
            elif isinstance(event, Started):
                stream.cached = event.num_cached_tokens
                self._queried += len(stream.request.prompt_token_ids)
                self._found += event.num_cached_tokens
            elif isinstance(event, Finished):
                stream.reason, stream.handoff = event.reason, event.handoff
                stream.wake()
            elif isinstance(event, PullReady):
                self._transfers.begin_pull(event, stream)
        self._notify()

    def _tell_kv_events(self) -> None:
        if self._journal and self._kv_events is not None:
            self._kv_events.publish(tuple(self._journal))
            self._journal.clear()
