"""One VllmWorker's work without the process around it: refuse when full, prefill here or there, decode."""

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
from dynamo_local.core.routing.estimates import Why
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.errors import KvTransferError, WorkerBusy
from dynamo_local.ports import Engine, EngineOutput, EngineRequest

log = logging.getLogger(__name__)

RETRY_AFTER_MAX_S = 60.0
RETRY_AFTER_S = 1.0
"""The wait that a full worker suggests: loads are published every second, so by then the picker has new ones."""


class DecodeService:
    """Serves generate requests on one engine; `remote` is None where every prefill is local. `side` is told how they
    go on, where it decides about prefills."""

    def __init__(
        self,
        engine: Engine,
        remote: RemotePrefill | None,
        max_num_waiting: int,
        side: DecodeSide | None = None,
        clock: Clock | None = None,
        counts: DispatchCounts | None = None,
        times: HandoffTimes | None = None,
    ) -> None:
        self._times = times or HandoffTimes()
        self._counts = counts or DispatchCounts()
        self._side = side
        self._clock = clock or AsyncioClock()
        self._engine = engine
        self._remote = remote
        self._max_num_waiting = max_num_waiting

    async def generate(self, payload: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Wire items; the first is empty and says that the request was taken.

        Raises `InvalidRequest`, `WorkerBusy` (before the first item), `EngineError`, `KvTransferError` (after tokens).
        """
        asked = messages.parse_generate_request(payload)
        waiting = self._engine.load().num_requests_waiting + (self._remote.waiting if self._remote else 0)
        if waiting >= self._max_num_waiting:
            self._counts.refused += 1
            raise WorkerBusy(
                f"{waiting} requests wait for this worker already (max_num_waiting {self._max_num_waiting})",
                retry_after_s=self._retry_after_s(),
            )
        yield {"token_ids": ()}
        # A client may send the same request id twice, and a retry does: the engine needs one of its own.
        request_id = f"{asked.request_id}-{secrets.token_hex(4)}"
        request = EngineRequest(request_id, asked.token_ids, asked.sampling, core=asked.core)
        async with contextlib.aclosing(self._followed(request, asked)) as outputs:
            async for output in outputs:
                yield messages.generate_item(output)

    def _retry_after_s(self) -> float:
        """When what waits is through, as far as that can be said."""
        if self._side is None:
            return RETRY_AFTER_S
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, self._side.backlog_s(self._clock.now_s())))

    async def _followed(
        self, request: EngineRequest, asked: messages.GenerateRequest
    ) -> AsyncGenerator[EngineOutput, None]:
        """The outputs; the side hears of them."""
        side, name, completed = self._side, request.request_id, False
        if side is not None:
            now_s = self._clock.now_s()
            side.began(name, len(request.prompt_token_ids), now_s)
            if (itl_ms := self._engine.load().itl_ms) is not None:
                side.itl_seen(itl_ms / 1000, now_s)
        try:
            async with contextlib.aclosing(self._outputs(request, asked)) as outputs:
                async for output in outputs:
                    if side is not None:
                        side.tokens(name, len(output.token_ids), self._clock.now_s())
                    completed = completed or output.finish_reason in ("stop", "length")
                    yield output
        finally:
            if side is not None:
                side.ended(name, completed=completed)

    async def _outputs(
        self, request: EngineRequest, asked: messages.GenerateRequest
    ) -> AsyncGenerator[EngineOutput, None]:
        params: Mapping[str, Any] | None = None
        if self._remote is not None and asked.prefill_here is not None:
            log.info("request %s is prefilled locally: %s", request.request_id, asked.prefill_here)
            self._counts.decided(remote=False, why=Why.CANNOT_TRAVEL)
        elif self._remote is not None:
            hit_rate = asked.prefix_hit_rate
            if hit_rate is None:  # no Router was asked: use what the engine itself knows
                hit_rate = self._engine.prefix_hit_rate(request.prompt_token_ids)
            params = await self._remote.prefill(request, hit_rate)
        if params is not None and self._remote is not None:
            started, began_s = False, self._clock.now_s()
            try:
                async with contextlib.aclosing(self._run(replace(request, kv_transfer_params=params))) as outputs:
                    async for output in outputs:
                        if not started:
                            self._times.pulls.append(self._clock.now_s() - began_s)
                        started = True
                        yield output
                return
            except KvTransferError as error:
                if started:
                    raise
                log.warning("request %s is prefilled locally, its KV did not arrive: %s", request.request_id, error)
                # If the prefill worker died before its ack, the entry would be redelivered although nobody wants it.
                self._remote.abandon(request.request_id)
                self._remote.came_to_nothing(request)
            request = replace(request, request_id=f"{request.request_id}-local")
        async with contextlib.aclosing(self._run(request)) as outputs:
            async for output in outputs:
                yield output

    def _run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        return cast(AsyncGenerator[EngineOutput, None], self._engine.generate(request))
