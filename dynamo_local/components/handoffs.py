"""The engines that hand over KV: `{namespace}/nixl_metadata/{engine id}` in etcd, under each worker's lease.

A decode worker learns of an engine when the first KV comes from it (any number of prefill workers may come and go),
and forgets it when its key goes. The address of the KV is part of each hand-off, so the KV of a leaving
prefill worker, which has given its lease back, can still be pulled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.components.messages import CanaryRequest
from dynamo_local.core.routing.disagg import ASK_PREFILL, first_id
from dynamo_local.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineError,
    FlipFailed,
    InfraUnavailable,
    KvTransferError,
)
from dynamo_local.ports import (
    DeleteEvent,
    EndpointClient,
    Engine,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    KeyValueStore,
    PutEvent,
    SamplingParams,
    SnapshotEvent,
    WatchEvent,
)
from dynamo_local.system.executors import ended

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 0.5
"""After this the KV is pulled unchecked: etcd may be away, and the pull has a deadline of its own."""


class EngineCard(msgspec.Struct, frozen=True):
    """The value of a key."""

    engine_id: str
    engine: str
    model: str
    block_size: int
    host: str
    port: int
    worker: str

    @classmethod
    def of(cls, info: EngineInfo, worker: str) -> EngineCard | None:
        """None for an engine that does not hand over KV."""
        if info.handoff_address is None:
            return None
        host, port = info.handoff_address
        return cls(info.engine_id, info.engine, info.model, info.block_size, host, port, worker)

    def encode(self) -> bytes:
        """The JSON to register."""
        return msgspec.json.encode(self)


def engine_key(namespace: str, engine_id: str) -> str:
    """`dynamo/nixl_metadata/{engine id}`"""
    return f"{namespace}/nixl_metadata/{engine_id}"


class EngineDirectory:
    """The cards of the engines that were asked about, each watched until it goes. `info` is our own engine's."""

    def __init__(self, kv: KeyValueStore, namespace: str, info: EngineInfo) -> None:
        self._kv = kv
        self._namespace = namespace
        self._info = info
        self._cards: dict[str, EngineCard | None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._loaded: dict[str, asyncio.Event] = {}

    @property
    def known(self) -> frozenset[str]:
        """Ids of the engines whose cards are loaded."""
        return frozenset(engine_id for engine_id, card in self._cards.items() if card is not None)

    async def check(self, params: Mapping[str, Any]) -> None:
        """Raises `KvTransferError` if these `kv_transfer_params` contradict the engine's card.

        An engine without a card is leaving, or dead: the pull will tell.
        """
        engine_id = first_id(str(params.get("remote_engine_id")))
        card = await self._load(engine_id)
        if card is None:
            return
        if card.model != self._info.model:
            raise KvTransferError(
                f"engine {engine_id} of {card.worker} runs model {card.model}, and this worker {self._info.model}: its "
                "KV is of no use here; give both the same model"
            )
        if card.engine != self._info.engine:
            raise KvTransferError(
                f"{card.worker} runs the {card.engine} engine, and this worker {self._info.engine}; give both the same"
            )
        if (params.get("remote_host"), params.get("remote_port")) != (card.host, card.port):
            raise KvTransferError(
                f"the KV is said to be at {params.get('remote_host')}:{params.get('remote_port')}, but engine "
                f"{engine_id} of {card.worker} is at {card.host}:{card.port}"
            )

    async def _load(self, engine_id: str) -> EngineCard | None:
        if engine_id not in self._watches:
            self._loaded[engine_id] = asyncio.Event()
            self._watches[engine_id] = asyncio.create_task(self._follow(engine_id), name=f"engine {engine_id}")
        try:
            if not (loaded := self._loaded[engine_id]).is_set():
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    await loaded.wait()
        except TimeoutError:
            log.warning("etcd does not say who engine %s is; its KV is pulled all the same", engine_id)
        return self._cards.get(engine_id)

    async def _follow(self, engine_id: str) -> None:
        """Load its card, and keep it as long as it is there."""
        key = engine_key(self._namespace, engine_id)
        events = cast(AsyncGenerator[WatchEvent, None], self._kv.watch_prefix(key))
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    value = self._value(event, key)
                    if value is None:
                        break
                    self._cards[engine_id] = _decoded(value, key)
                    self._loaded[engine_id].set()
        except InfraUnavailable as error:
            log.warning("engine %s is looked up again at its next KV: %s", engine_id, error)
        finally:
            self._cards.pop(engine_id, None)
            self._watches.pop(engine_id, None)
            self._loaded.pop(engine_id).set()

    @staticmethod
    def _value(event: WatchEvent, key: str) -> bytes | None:
        """The card's bytes after the event; None if it is gone."""
        if isinstance(event, SnapshotEvent):
            return next((kv.value for kv in event.kvs if kv.key == key), None)
        if isinstance(event, PutEvent):
            return event.kv.value
        assert isinstance(event, DeleteEvent)
        return None

    async def close(self) -> None:
        """End the watches."""
        await ended(*self._watches.values())


def _decoded(value: bytes, key: str) -> EngineCard | None:
    try:
        return msgspec.json.decode(value, type=EngineCard)
    except msgspec.DecodeError as error:
        log.warning("the value of %s in etcd is skipped: %s", key, error)
        return None


# --- How long one engine's hand-offs take, in either role. A canary's deadline follows from them, not from a constant.
#
# The worker keeps it when it changes its role.

HANDOFF_TIMES = "handoff_times"
"""Under which it is handed over to the next role."""
KEPT = 20
TIMES_SLOWEST = 3.0
LEAST_S = 2.0
UNKNOWN_S = 5.0
"""The time for an engine that has taken no KV yet. The first transfer between two engines is slower, because they
connect then."""
MOST_S = 8.0
"""Below the deadline of a flip."""


class HandoffTimes:
    """The last ones, in seconds: `prefills` that were computed here, `pulls` from KV's identity to the first token."""

    def __init__(self) -> None:
        self.prefills: deque[float] = deque(maxlen=KEPT)
        self.pulls: deque[float] = deque(maxlen=KEPT)

    def patience_s(self) -> float:
        """For a hand-off that is tried out: a multiple of the slowest that was seen here."""
        slowest_s = max(self.prefills, default=0.0) + max(self.pulls, default=0.0)
        return min(MOST_S, max(LEAST_S if self.pulls else UNKNOWN_S, TIMES_SLOWEST * slowest_s))

    def describe(self) -> str:
        """For a person: by what the patience was chosen."""
        if not self.pulls:
            return "this engine has taken no KV yet"
        return f"this engine's last ones took {max(self.pulls):.2f} s at most"


DROP_S = 5.0


async def dropped(engine: Engine, request: EngineRequest, params: Mapping[str, Any]) -> None:
    """Pull KV that nobody wants any more, so that its prefill worker frees it now and not when its lease ends.

    Engines free KV when it is pulled, whatever connector moves it. Logs a failure: then the lease frees it.
    """
    unwanted = replace(
        request,
        request_id=f"{request.request_id}-dropped",
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        kv_transfer_params=params,
        core=None,
    )
    try:
        async with asyncio.timeout(DROP_S):
            await _last(engine, unwanted)
    except (DynamoError, TimeoutError) as error:
        log.info("KV of %s that nobody wants is kept until its lease ends: %s", request.request_id, error)


# --- A worker that begins to decode tests a hand-off first: another worker prefills a few tokens, this one decodes
# them.
#
# They do not go through the prefill queue, in which they would wait behind everybody else's. Each is given time by what
# this engine's hand-offs have taken so far (`prefilling.handoff_times`). Where a prefill worker does not answer soon
# the next one is asked, too; only where none can do it, the flip has failed. Where there is no other prefill worker at
# all (somebody has forced it), the engine has only itself to show.

PROMPT_TOKENS = 33
"""More than a block of the usual size of 32: a whole one is moved."""
NEW_TOKENS = 2
NEXT_AFTER_S = 2.0
"""A prefill worker that has not answered by then may be dead: the next one is asked, too."""
KNOWN_WITHIN_S = 0.5
"""Until the first instances are known; without a prefill worker they never are."""


async def prefilled(engine: Engine, canary: CanaryRequest) -> dict[str, Any]:
    """The prefill side: the KV's identity, as a prefill's reply has it. Raises what the engine does."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = EngineRequest(canary.request_id, tuple(canary.token_ids), sampling, dict(ASK_PREFILL))
    last = await _last(engine, request)
    return dict(messages.prefill_reply(last))


class Canary:
    """`workers` are the prefill workers' `canary` endpoints. `itself` is this process's instance among them. `check`
    raises `KvTransferError` for KV of another model. `times` are this engine's hand-offs so far."""

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
        """Return as soon as one hand-off has succeeded. A slow worker is not given up when the next one is asked."""
        patience_s, because, failed = self._times.patience_s(), self._times.describe(), list[str]()
        attempts: dict[asyncio.Task[None], int] = {}
        try:
            async with asyncio.timeout(MOST_S):
                while attempts or peers:
                    if peers:
                        peer = peers.pop()
                        attempts[asyncio.create_task(self._within(peer, patience_s))] = peer
                    done, _ = await asyncio.wait(
                        attempts, timeout=NEXT_AFTER_S if peers else None, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        peer, error = attempts.pop(task), task.exception()
                        if error is None:
                            return
                        if not isinstance(error, DynamoError | TimeoutError):
                            raise error
                        why = str(error) or f"nothing within {patience_s:.1f} s"
                        log.warning("the canary of prefill worker %x: %s", peer, why)
                        failed.append(f"{peer:x}: {why}")
        except TimeoutError:
            failed += [f"{peer:x}: nothing within {MOST_S:g} s" for peer in attempts.values()]
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
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
        payload = {"request_id": request.request_id, "token_ids": list(request.prompt_token_ids)}
        began_s = self._clock.now_s()
        stream = await self._workers.call(
            payload, instance_id=peer, request_id=request.request_id, timeout_s=patience_s
        )
        try:
            answers = [item async for item in stream]
        finally:
            await stream.aclose()
        if not answers:
            raise EngineError("the prefill worker answered nothing")
        params = messages.parse_prefill_reply(answers[0]).kv_transfer_params
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
