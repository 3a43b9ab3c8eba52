"""A worker that begins to decode tries out a hand-off first: a few tokens, prefilled by another one, decoded here.

They do not go through the prefill queue, in which they would wait behind everybody else's. Each is given time by what
this engine's hand-offs have taken so far (`prefilling.handoff_times`). Where a prefill worker does not answer soon the
next one is asked, too; only where none can do it, the flip has failed. Where there is no other prefill worker at all
(somebody has forced it), the engine has only itself to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.components.messages import CanaryRequest
from dynamo_local.components.prefilling.handoff_times import MOST_S, HandoffTimes
from dynamo_local.core.kv.handover import ASK_PREFILL
from dynamo_local.errors import DeadlineExceeded, DynamoError, EngineError, FlipFailed
from dynamo_local.ports import EndpointClient, Engine, EngineOutput, EngineRequest, SamplingParams

log = logging.getLogger(__name__)

PROMPT_TOKENS = 33
"""More than a block of the usual size of 32: a whole one is moved."""
NEW_TOKENS = 2
NEXT_AFTER_S = 2.0
"""A prefill worker that has not answered by then may be dead: the next one is asked, too."""
KNOWN_WITHIN_S = 0.5
"""Until the first instances are known; without a prefill worker they never are."""


async def prefilled(engine: Engine, asked: CanaryRequest) -> dict[str, Any]:
    """The prefill side: the KV's identity, as a prefill's reply has it. Raises what the engine does."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = EngineRequest(asked.request_id, tuple(asked.token_ids), sampling, dict(ASK_PREFILL))
    last = await _last(engine, request)
    return dict(messages.prefill_reply(last))


class Canary:
    """`workers` are the prefill workers' `canary` endpoints, `itself` the instance that this process is among them;
    `check` raises `KvTransferError` for KV of another model; `times` are this engine's hand-offs so far."""

    def __init__(
        self,
        engine: Engine,
        workers: EndpointClient,
        check: Callable[[Mapping[str, Any]], Awaitable[None]],
        *,
        times: HandoffTimes,
        itself: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._itself = itself
        self._times = times
        self._clock = clock or AsyncioClock()
        self._engine = engine
        self._workers = workers
        self._check = check

    async def sing(self) -> None:
        """Raises `FlipFailed` that says what every prefill worker has failed with."""
        with contextlib.suppress(DynamoError):
            await self._workers.wait_for_instances(KNOWN_WITHIN_S)
        known = [instance.instance_id for instance in self._workers.instances()]
        peers = [instance_id for instance_id in known if instance_id != self._itself]
        random.shuffle(peers)
        if peers:
            await self._one_of(peers)
            return
        log.warning("there is no other prefill worker: only decoding was tried out")
        await self._decoded(_request(None))

    async def _one_of(self, peers: list[int]) -> None:
        """Return as soon as one hand-off has succeeded. Whoever is slow is not given up when the next one is asked."""
        patience_s, because, failed = self._times.patience_s(), self._times.words(), list[str]()
        asked: dict[asyncio.Task[None], int] = {}
        try:
            async with asyncio.timeout(MOST_S):
                while asked or peers:
                    if peers:
                        peer = peers.pop()
                        asked[asyncio.create_task(self._within(peer, patience_s))] = peer
                    done, _ = await asyncio.wait(
                        asked, timeout=NEXT_AFTER_S if peers else None, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        peer, error = asked.pop(task), task.exception()
                        if error is None:
                            return
                        if not isinstance(error, DynamoError | TimeoutError):
                            raise error
                        why = str(error) or f"nothing within {patience_s:.1f} s"
                        log.warning("the canary of prefill worker %x: %s", peer, why)
                        failed.append(f"{peer:x}: {why}")
        except TimeoutError:
            failed += [f"{peer:x}: nothing within {MOST_S:g} s" for peer in asked.values()]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise FlipFailed(
            f"no hand-off from a prefill worker succeeded: {'; '.join(failed)} ({because}); "
            "a later try is given more time"
        )

    async def _within(self, peer: int, patience_s: float) -> None:
        began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(patience_s):
                await self._hand_off(peer, patience_s)
        except (TimeoutError, DeadlineExceeded):
            self._times.pulls.append(patience_s)  # at least so long: the next try waits longer
            raise
        self._times.pulls.append(self._clock.now_s() - began_s)

    async def _hand_off(self, peer: int, patience_s: float) -> None:
        request = _request(None)
        asked = {"request_id": request.request_id, "token_ids": list(request.prompt_token_ids)}
        began_s = self._clock.now_s()
        stream = await self._workers.call(asked, instance_id=peer, request_id=request.request_id, timeout_s=patience_s)
        try:
            answers = [item async for item in stream]
        finally:
            await stream.aclose()
        if not answers:
            raise EngineError("the prefill worker answered nothing")
        params = messages.parse_prefill_reply(answers[0])
        await self._check(params)
        prefilled_s = self._clock.now_s()
        await self._decoded(_request(params, request.request_id, request.prompt_token_ids))
        decoded_s = self._clock.now_s() - prefilled_s
        log.info(
            "the canary of prefill worker %x: prefilled %.3f, pulled and decoded %.3f s",
            peer,
            prefilled_s - began_s,
            decoded_s,
        )

    async def _decoded(self, request: EngineRequest) -> None:
        last = await _last(self._engine, request)
        if last.finish_reason != "length":
            raise EngineError(f"the canary ended with {last.finish_reason}")


def _request(
    params: Mapping[str, Any] | None, request_id: str | None = None, tokens: Sequence[int] | None = None
) -> EngineRequest:
    # Another prompt each time: what is cached would not have to be handed over.
    given = tuple(tokens) if tokens is not None else tuple(secrets.choice(TOKENS) for _ in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id or f"canary-{secrets.token_hex(6)}", given, sampling, params)


TOKENS = range(3, 200)
"""Ids that every vocabulary has, and that are not its special ones."""


async def _last(engine: Engine, request: EngineRequest) -> EngineOutput:
    last: EngineOutput | None = None
    outputs = cast(AsyncGenerator[EngineOutput, None], engine.generate(request))
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            last = output
    if last is None or last.finish_reason in (None, "error", "abort"):
        raise EngineError(f"the canary {request.request_id} ended without a result")
    return last
