"""The simulated engine behind `ports.Engine`: an asyncio shell around the pure `SimScheduler`.

One task sleeps to the end of the current pass, by the scheduler's own times: if it wakes late it catches up, and
nothing drifts. Under a virtual-time loop (`clock.run_virtual`) the same code runs as fast as it can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.kv_events import AllBlocksCleared, KvEvent
from dynamo_local.core.types import Load
from dynamo_local.engines.base import EngineBase
from dynamo_local.engines.sim.facts import load_of, shape_of
from dynamo_local.engines.sim.handoffs import Handoff
from dynamo_local.engines.sim.keys import OutputKeys
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.perf import PerfModel, ProfileModel
from dynamo_local.engines.sim.requests import (
    Event,
    Finished,
    HandoffExpired,
    PullReady,
    SimRequest,
    Started,
    Tokens,
)
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.engines.sim.tokens import TokenStream, natural_length, plan_output, prompt_digest
from dynamo_local.engines.sim.transport import KvListener, KvTransport, LoopbackTransport, PullRequest, pull_request_of
from dynamo_local.errors import EngineDead, InvalidRequest, KvTransferError
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import EngineInfo, EngineOutput, EngineRequest, FinishReason, KvEventPublisher

logger = logging.getLogger(__name__)

_REMEMBERED_EXPIRIES = 1000


class _Stream:
    """What one `generate` waits for. `pending` tokens were computed and not yet handed on."""

    __slots__ = (
        "cached",
        "delivered",
        "error",
        "first",
        "handoff",
        "pending",
        "pull",
        "reason",
        "request",
        "tokens",
        "waiter",
    )

    def __init__(self, request: EngineRequest, tokens: TokenStream, pull: PullRequest | None) -> None:
        self.request = request
        self.tokens = tokens
        self.pull = pull
        self.first = 0
        self.delivered = False
        self.pending = 0
        self.cached: int | None = None
        self.reason: FinishReason | None = None
        self.handoff: Handoff | None = None
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class SimEngine(EngineBase):
    """An `Engine` that schedules like vLLM, takes a profile's time, and computes `tokens.expected_output`.

    `transport` defaults to a loopback side channel of its own; engines on a virtual clock share an `InMemoryTransport`.
    `perf_model` defaults to the profile that the options name. `kv_events` is told what its KV cache holds.
    """

    def __init__(
        self,
        options: SimOptions | None = None,
        *,
        clock: Clock | None = None,
        transport: KvTransport | None = None,
        perf_model: PerfModel | None = None,
        kv_events: KvEventPublisher | None = None,
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
        self._streams: dict[str, _Stream] = {}
        self._handed_over: dict[str, str] = {}
        self._expired: deque[str] = deque(maxlen=_REMEMBERED_EXPIRIES)
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.Task[None] | None = None
        self._timer_at_s: float | None = None
        self._kicked = False
        self._turn_s = 0.0
        self._count = 0

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the profile, open the side channel, and take `start_up_s / speed` in all. Raises `ConfigError`."""
        ready_at_s = self._clock.now_s() + self.options.start_up_s / self.options.speed
        perf = self._perf_model or ProfileModel.load(self.options.profile)
        config, max_model_len = shape_of(self.options, perf)
        self._listener = await self._transport.serve(self)
        await self._clock.sleep_until(ready_at_s)
        self._scheduler = SimScheduler(config, perf, self._journal)
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
        )

    async def close(self) -> None:
        if self._scheduler is not None and self._kv_events is not None:
            self._kv_events.publish((AllBlocksCleared(),))
        self._scheduler = None
        for stream in self._streams.values():
            stream.reason = stream.reason or "abort"
            stream.wake()
        tasks = [task for task in (self._timer, *self._pulls.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        self._notify()

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
                stream.first += count
                reason = stream.reason
                stream.delivered = reason is not None
                yield EngineOutput(token_ids, reason, stream.cached, self._kv_transfer_params(stream.handoff))
                if reason is not None:
                    return
        finally:
            self._forget(internal_id)

    def _submit(self, request: EngineRequest) -> tuple[str, _Stream]:
        """Check, plan and queue a request. Raises `InvalidRequest`, `KvTransferError` or `EngineError`."""
        scheduler = self._alive(self._scheduler)
        prompt, sampling, options = request.prompt_token_ids, request.sampling, self.options
        self._check(request)
        try:
            digest = prompt_digest(prompt, seed=options.seed)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"the prompt holds something that is no token id: {error}", param="prompt") from error
        tokens = TokenStream(digest, token_low=options.token_low, token_high=options.token_high)
        params = request.kv_transfer_params or {}
        hold = bool(params.get("do_remote_decode"))
        pull = pull_request_of(params, request.request_id, digest) if params.get("do_remote_prefill") else None
        most = min(sampling.max_tokens, self.info.max_model_len - len(prompt))
        count, reason = plan_output(
            tokens,
            natural=natural_length(digest, options.mean_output_tokens),
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
        stream = self._streams[internal_id] = _Stream(request, tokens, pull)
        if hold:
            self._handed_over[internal_id] = digest.hex()
        if self._count == options.fail_after_requests:
            self._fail(RuntimeError(f"its option fail_after_requests is {self._count}"))
        return internal_id, stream

    def _forget(self, internal_id: str) -> None:
        """The stream's consumer has left: if it still runs, end it and free its blocks."""
        stream = self._streams.pop(internal_id)
        if stream.delivered:
            return
        self._handed_over.pop(internal_id, None)
        task = self._pulls.pop(internal_id, None)
        if task is not None:
            task.cancel()
        if self._scheduler is not None:
            self._scheduler.abort(internal_id, self._now_s())
            # Finished, but nobody has heard of the hand-off: nobody can pull it.
            self._scheduler.release(internal_id, self._now_s())
            self._kick()

    # --- what can be seen ----------------------------------------------------------------------

    def load(self) -> Load:
        """Now; all zero before `start` and after `close`."""
        scheduler = self._scheduler
        if scheduler is None:
            return Load()
        self._pump()
        return load_of(scheduler)

    def prefix_hit_rate(self, prompt_token_ids: Sequence[int]) -> float:
        if self._scheduler is None or not prompt_token_ids:
            return 0.0
        self._pump()
        keys = block_hashes(prompt_token_ids, self.options.block_size)
        return self._scheduler.matched_tokens(keys) / len(prompt_token_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False while requests hold blocks (as vLLM's)."""
        done = self._alive(self._scheduler).reset_prefix_cache(self._now_s())
        self._tell_kv_events()
        return done

    async def wait_failed(self) -> None:
        while self._scheduler is not None:
            await self.load_changed()
        if self._death is not None:
            raise EngineDead(self._death)

    async def wait_handoffs(self) -> None:
        while self._scheduler is not None and self._scheduler.num_held:
            await self.load_changed()

    # --- time ----------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Look at the schedule once all that is ready in this turn of the loop has been submitted: one pass for all."""
        if not self._kicked:
            self._turn_s = self._clock.now_s()
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._kick_now)

    def _now_s(self) -> float:
        """What comes in one turn of the loop comes at one instant, though the clock goes on between the calls."""
        return self._turn_s if self._kicked else self._clock.now_s()

    def _kick_now(self) -> None:
        self._kicked = False
        try:
            at_s = self._pump()
        except Exception as error:
            # A callback of the loop has nobody to raise to: every stream is told instead.
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
        """A bug, or a performance model that raises: no stream may wait for ever."""
        logger.error("the simulated engine failed", exc_info=error)
        self._scheduler = None
        self._death = f"the simulated engine failed: {type(error).__name__}: {error}"
        for stream in self._streams.values():
            stream.error = EngineDead(self._death)
            stream.wake()
        self._notify()

    def _pump(self, due_s: float | None = None) -> float | None:
        """Bring the schedule to now, hand on what happened; returns when to do so again."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        now_s = self._now_s() if due_s is None else max(due_s, self._now_s())
        while True:
            events = scheduler.advance(now_s)
            if events:
                self._dispatch(events)
            self._tell_kv_events()
            at_s = scheduler.next_event_at(quiet=self.options.coalesce_passes)
            if at_s is None or at_s > now_s:
                return at_s

    def _dispatch(self, events: list[Event]) -> None:
        streams = self._streams
        for event in events:
            stream = streams.get(event.request_id)
            if isinstance(event, Tokens):
                if stream is not None:
                    stream.pending += len(event.times_s)
                    stream.wake()
            elif isinstance(event, HandoffExpired):
                self._handed_over.pop(event.request_id, None)
                self._expired.append(event.request_id)
                logger.warning("the KV of request %s was not pulled within its lease", event.request_id)
            elif stream is None:
                continue
            elif isinstance(event, Started):
                stream.cached = event.num_cached_tokens
            elif isinstance(event, Finished):
                stream.reason, stream.handoff = event.reason, event.handoff
                stream.wake()
            elif isinstance(event, PullReady):
                task = asyncio.get_running_loop().create_task(self._pull(event, stream))
                self._pulls[event.request_id] = task
        self._notify()

    def _tell_kv_events(self) -> None:
        if self._journal and self._kv_events is not None:
            self._kv_events.publish(tuple(self._journal))
            self._journal.clear()

    # --- KV hand-off ---------------------------------------------------------------------------

    def _kv_transfer_params(self, handoff: Handoff | None) -> Mapping[str, Any] | None:
        """What a prefill answers with: the shape of vLLM's NixlConnector, to be handed to a decode engine unchanged."""
        if handoff is None or self._listener is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": list(handoff.blocks),
            "remote_request_id": handoff.request_id,
            "remote_host": self._listener.host,
            "remote_port": self._listener.port,
            "tp_size": 1,
        }

    async def serve_pull(self, pull: PullRequest) -> None:
        """The source's side of a pull (`transport.KvSource`)."""
        scheduler = self._scheduler
        if scheduler is None or pull.engine_id != self._engine_id:
            raise KvTransferError(
                f"the KV of request {pull.request_id} is of engine {pull.engine_id}, and this is engine "
                f"{self._engine_id}; prefill it again",
                remote_request_id=pull.request_id,
            )
        self._pump()
        digest = self._handed_over.get(pull.request_id)
        if digest is not None and digest != pull.prompt_digest:
            raise KvTransferError(f"the KV of request {pull.request_id} is that of another prompt; nothing was pulled")
        started_s = self._clock.now_s()
        try:
            scheduler.pin(pull.request_id, started_s)
        except KeyError:
            lease_s = self.options.kv_lease_duration_s
            why = f"its lease of {lease_s:g} s is over" if pull.request_id in self._expired else "it is not held here"
            raise KvTransferError(
                f"the KV of request {pull.request_id} cannot be pulled: {why}; prefill it again",
                remote_request_id=pull.request_id,
            ) from None
        self._kick()
        try:
            await self._clock.sleep_until(started_s + self.options.transfer_s(pull.num_tokens))
        except asyncio.CancelledError:
            scheduler.unpin(pull.request_id, self._clock.now_s())
            self._kick()
            raise
        if self._scheduler is not scheduler:
            raise KvTransferError(f"engine {self._engine_id} was closed while the KV of {pull.request_id} was pulled")
        scheduler.release(pull.request_id, self._clock.now_s())
        self._handed_over.pop(pull.request_id, None)
        self._notify()
        self._kick()

    async def _pull(self, event: PullReady, stream: _Stream) -> None:
        """The decode side of a pull: the blocks are allocated, now fill them."""
        assert stream.pull is not None
        params = stream.request.kv_transfer_params or {}
        identity = stream.pull
        request = PullRequest(identity.engine_id, identity.request_id, identity.prompt_digest, event.num_tokens)
        try:
            async with asyncio.timeout(self.options.kv_pull_timeout_s):
                await self._transport.pull(params["remote_host"], params["remote_port"], request)
        except TimeoutError:
            stream.error = KvTransferError(
                f"the KV of request {request.request_id} was not pulled within {self.options.kv_pull_timeout_s:g} s",
                remote_request_id=request.request_id,
            )
        except KvTransferError as error:
            stream.error = error
        finally:
            self._pulls.pop(event.request_id, None)
        if stream.error is not None:
            # Waking the stream ends it, and that frees its blocks here.
            stream.wake()
        elif self._scheduler is not None:
            self._scheduler.pulled(event.request_id, self._clock.now_s())
            self._kick()
