"""In a VllmWorker: refuses a request when full, has its prompt prefilled here or elsewhere, and decodes it."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, cast

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.components.handoffs import HandoffTimes
from dynamo_local.components.remote_prefill import DispatchCounts, RemotePrefill
from dynamo_local.core.routing.estimates import Timing, Why
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.served import Served
from dynamo_local.errors import KvTransferError, NotContinuable, WorkerBusy, WorkerDraining
from dynamo_local.ports import Engine, EngineOutput, EngineRequest
from dynamo_local.system import tracing

log = logging.getLogger(__name__)

RETRY_AFTER_MAX_S = 60.0
RETRY_AFTER_S = 1.0
"""The wait that a full worker suggests: loads are published every second, so by then the picker has new ones."""


class DecodeService:
    """Serves generate requests on one engine; `remote` is None where every prefill is local. `side` is told how they
    go on, where it decides about prefills. `timing` tells how long a prompt alone takes."""

    def __init__(
        self,
        engine: Engine,
        remote: RemotePrefill | None,
        max_num_waiting: int,
        side: DecodeSide | None = None,
        clock: Clock | None = None,
        counts: DispatchCounts | None = None,
        times: HandoffTimes | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._timing = timing
        self._times = times or HandoffTimes()
        self._counts = counts or DispatchCounts()
        self._side = side
        self._clock = clock or AsyncioClock()
        self._engine = engine
        self._remote = remote
        self._max_num_waiting = max_num_waiting
        self.served = Served()

    async def generate(self, payload: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Wire items; the first is empty and says that the request was taken.

        Raises `InvalidRequest`, `WorkerBusy`, `WorkerDraining` (before the first item), `NotContinuable` (before
        tokens), `EngineError`, `KvTransferError` (after tokens).
        """
        message = messages.parse_generate_request(payload)
        self._refuse_if_dead_or_full(begun=bool(message.generated))
        hit_rate = message.prefix_hit_rate
        yield {"token_ids": ()} if hit_rate is None else {"token_ids": (), "kv_hit_rate": hit_rate}
        # A client may send the same request id twice, and a retry does: the engine needs one of its own.
        name = f"{message.request_id}-{secrets.token_hex(4)}"
        request = EngineRequest(
            name, message.token_ids, message.sampling, core=message.core, generated=message.generated
        )
        if message.generated and (why := self._engine.why_not_continued(request)) is not None:
            raise NotContinuable(why)
        side, completed, stages = self._side, False, tracing.stages()
        taken_s, last_s = self._clock.now_s(), None
        self._tell_begin(request)
        try:
            params = await self._prefilled(request, message)
            where = "local" if params is None else "remote"
            tracing.note(lambda: {"dynamo.prefill": where, "gen_ai.usage.input_tokens": len(message.token_ids)})
            while True:
                started, began_s = False, self._clock.now_s()
                given = request if params is None else replace(request, kv_transfer_params=params)
                stages.begin("prefill" if params is None else "transfer")
                outputs = cast(AsyncGenerator[EngineOutput, None], self._engine.generate(given))
                try:
                    async with contextlib.aclosing(outputs):
                        async for output in outputs:
                            now_s, phases = self._clock.now_s(), None
                            if not started:
                                started = True
                                stages.begin("decode")
                                if params is not None:
                                    self._times.pulls.append(now_s - began_s)
                                if output.token_ids and not message.generated:
                                    phases = self._phases(request, output, now_s - began_s, away=params is not None)
                            if side is not None:
                                side.tokens(name, len(output.token_ids), now_s)
                            last_s = self._count(output, now_s, taken_s, last_s)
                            completed = completed or output.finish_reason in ("stop", "length")
                            item = messages.generate_item(output, goes_on=bool(message.generated))
                            yield item if phases is None else {**item, "phases": phases}
                    return
                except KvTransferError as error:
                    if params is None or started:
                        raise
                    self._give_up_handover(request, error)
                request, params = replace(request, request_id=f"{name}-local"), None
        finally:
            self.served.ended()
            stages.end()
            if side is not None:
                side.ended(name, completed=completed)
            if self._remote is not None:
                self._remote.prefilled.pop(name, None)

    def _count(self, output: EngineOutput, now_s: float, taken_s: float, last_s: float | None) -> float | None:
        """Count the output's tokens. Returns when the request's last token came; None: it has none yet."""
        if not (count := len(output.token_ids)):
            return last_s
        if last_s is None:
            self.served.first(now_s - taken_s, count)
        else:
            self.served.more(now_s - last_s, count)
        return now_s

    def _phases(
        self, request: EngineRequest, output: EngineOutput, engine_s: float, *, away: bool
    ) -> tuple[float, float, str | None] | None:
        """`core.traffic.Phases` of the first token, which the engine took `engine_s` for; None: they are not known.

        A prompt that is computed here has the profile's time: the rest of the engine's is a wait.
        """
        if away:
            found = self._remote.prefilled.get(request.request_id) if self._remote is not None else None
            return None if found is None else (found[0], engine_s, found[1])
        if self._timing is None:
            return None
        alone_s = self._timing.prefill_s(len(request.prompt_token_ids), output.num_cached_tokens or 0)
        return min(engine_s, alone_s), 0.0, None

    def _refuse_if_dead_or_full(self, *, begun: bool) -> None:
        """`begun`: the client has a part of the answer, so that a full worker takes it."""
        if (death := self._engine.death()) is not None:
            raise WorkerDraining(f"the engine of this worker has ended, and the worker leaves: {death}")
        if begun:
            return
        waiting = self._engine.load().num_requests_waiting + (self._remote.waiting if self._remote else 0)
        if waiting < self._max_num_waiting:
            return
        self._counts.refused += 1
        retry_after_s = RETRY_AFTER_S
        if self._side is not None:
            retry_after_s = min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, self._side.backlog_s(self._clock.now_s())))
        raise WorkerBusy(
            f"{waiting} requests wait for this worker already (max_num_waiting {self._max_num_waiting})",
            retry_after_s=retry_after_s,
        )

    def _tell_begin(self, request: EngineRequest) -> None:
        if (side := self._side) is None:
            return
        now_s = self._clock.now_s()
        side.began(request.request_id, len(request.prompt_token_ids), now_s)
        if (itl_ms := self._engine.load().itl_ms) is not None:
            side.itl_seen(itl_ms / 1000, now_s)

    async def _prefilled(self, request: EngineRequest, message: messages.GenerateRequest) -> Mapping[str, Any] | None:
        """The identity of KV that a prefill worker has computed; None: this engine computes the prompt."""
        if self._remote is None:
            return None
        if message.prefill_here is not None:
            log.info("request %s is prefilled locally: %s", request.request_id, message.prefill_here)
            self._counts.decided(remote=False, why=Why.CANNOT_TRAVEL)
            return None
        hit_rate = message.prefix_hit_rate
        if hit_rate is None and message.lora_id:
            hit_rate = 0.0  # the engine would look the base model's blocks up
        if hit_rate is None:  # no Router was asked: use what the engine itself knows
            hit_rate = self._engine.prefix_hit_rate(request.prompt_token_ids)
        return await self._remote.prefill(request, hit_rate)

    def _give_up_handover(self, request: EngineRequest, error: KvTransferError) -> None:
        assert self._remote is not None
        log.warning("request %s is prefilled locally, its KV did not arrive: %s", request.request_id, error)
        # If the prefill worker died before its ack, the entry would be redelivered although nobody wants it.
        self._remote.abandon(request.request_id)
        self._remote.came_to_nothing(request)
