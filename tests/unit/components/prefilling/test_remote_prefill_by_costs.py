"""`disagg-policy: slo` in a decode worker: what its side is told, what is enqueued, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.components import messages
from dynamo_local.components.decode import RETRY_AFTER_MAX_S, DecodeService
from dynamo_local.components.remote_prefill import DispatchCounts, RemotePrefill
from dynamo_local.core.routing import disagg
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.core.routing.estimates import Targets, Timing, Why
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.types import Load
from dynamo_local.errors import KvTransferError, WorkerBusy, WorkerDraining
from dynamo_local.ports import EngineOutput, EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import FixedModel
from tests.fakes.data_plane.worker_context import FakePrefillReplies
from tests.fakes.infra.prefill_queue import FakePrefillQueue

PERF = FixedModel(prefill_ms_per_token=0.1, decode_ms=10.0, max_kv_tokens=100_000)
LONG = list(range(5000))


class Engine:
    """Answers of `tokens` tokens, each when `gate` lets it; `fails` with the KV of a hand-over as often as said."""

    def __init__(self, tokens: int = 3) -> None:
        self.tokens = tokens
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0
        self.waiting = 0
        self.dead: str | None = None
        self.asked: list[EngineRequest] = []

    def load(self) -> Load:
        return Load(num_requests_waiting=self.waiting)

    def death(self) -> str | None:
        return self.dead

    def prefix_hit_rate(self, prompt_token_ids: Any) -> float:
        return 0.0

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.asked.append(request)
        if request.kv_transfer_params is not None and self.fails:
            self.fails -= 1
            raise KvTransferError("gone")
        for n in range(self.tokens):
            await self.gate.wait()
            yield EngineOutput((n,), "length" if n == self.tokens - 1 else None)


class Worker:
    """A decode worker's parts around its side."""

    def __init__(self, queue: FakePrefillQueue, **options: Any) -> None:
        self.side = DecodeSide(Timing(PERF), Targets(2.0, 0.05))
        self.engine, self.queue = Engine(), queue
        self.replies = FakePrefillReplies({}, "decode")
        self.counts = DispatchCounts()
        self.remote = RemotePrefill(
            queue,
            self.replies,
            settings=lambda: DisaggSettings(0, 0),
            prefill_workers=lambda: 1,
            conditional=True,
            timeout_s=options.pop("timeout_s", 5.0),
            side=self.side,
            counts=self.counts,
        )
        self.service = DecodeService(self.engine, self.remote, 10, self.side, counts=self.counts)  # type: ignore[arg-type]

    async def ask(self, name: str = "r", ids: list[int] = LONG, **more: Any) -> list[Any]:
        request = {**messages.generate_request(name, ids, SamplingParams(max_tokens=5)), **more}
        return [item async for item in self.service.generate(request)]

    async def harmable(self, count: int = 4) -> list[asyncio.Task[list[Any]]]:
        """So many streams that run, and stand still until the engine's gate opens again."""
        self.engine.tokens = 2
        for number in range(40):
            await self.ask(f"old {number}", [1])
        self.engine.tokens = 3
        self.engine.gate.clear()
        asked = [asyncio.create_task(self.ask(f"stream {n}", [1])) for n in range(count)]
        while len(self.engine.asked) < 40 + count:
            await asyncio.sleep(0)
        for request in self.engine.asked[-count:]:
            self.side.tokens(request.request_id, 1, asyncio.get_running_loop().time())
        return asked


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(FakePrefillQueue())
    yield made
    made.engine.gate.set()
    await made.remote.finish()


async def test_a_dead_engine_refuses(worker: Worker) -> None:
    """As a worker that leaves: what comes then has not killed it."""
    worker.engine.dead = "out of memory"
    with pytest.raises(WorkerDraining, match="out of memory"):
        await worker.ask()


async def test_alone_a_prompt_is_prefilled_where_it_is_sooner(worker: Worker) -> None:
    """Nobody is harmed and the hand-over takes time: here. The thresholds, which would say the same, do not count."""
    await worker.ask()
    assert not worker.queue.server.seen
    assert worker.counts.numbers() == {"prefills_remote": 0, "prefills_local": 1, "dispatch_fallbacks": 0}
    assert worker.side.running == 0


async def test_a_prompt_that_would_harm_streams_goes_away_with_its_latest_start(worker: Worker) -> None:
    """The entry says when it has to be begun; its answer comes by the KV that was handed over."""
    streams = await worker.harmable()
    asked = asyncio.create_task(worker.ask())
    pulled = await worker.queue.pull(2)
    assert pulled is not None
    [entry] = worker.queue.server.entries.values()
    assert entry.start_by_s is not None
    assert 0.5 < entry.start_by_s - worker.queue.clock.now_s() < 1.5  # 2 s less 0.5 s of prefill and the hand-over
    await worker.replies.send_reply("decode", pulled.task.request_id, {"kv_transfer_params": {"a": 1}})
    worker.engine.gate.set()
    await asyncio.gather(asked, *streams)
    assert worker.engine.asked[-1].kv_transfer_params == {"a": 1}
    assert worker.counts.remote == 1
    assert worker.side.running == 0


async def test_kv_that_does_not_arrive_means_here(worker: Worker) -> None:
    """The side knows that the prompt is computed here after all, and nothing of it is left in the end."""
    streams = await worker.harmable()
    worker.engine.fails = 1
    asked = asyncio.create_task(worker.ask())
    pulled = await worker.queue.pull(2)
    assert pulled is not None
    await worker.replies.send_reply("decode", pulled.task.request_id, {"kv_transfer_params": {"a": 1}})
    worker.engine.gate.set()
    await asyncio.gather(asked, *streams)
    assert worker.engine.asked[-1].kv_transfer_params is None
    assert worker.side.backlog_s(0.0) == 0.0


async def test_an_unknown_queue_is_a_fallback_and_counted(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disagg, "DEPTH_MAX_AGE_S", 0.0)
    streams = await worker.harmable()
    worker.queue.server.available = False
    asked = asyncio.create_task(worker.ask())
    async with asyncio.timeout(5.0):
        while worker.counts.fallbacks == 0:
            await asyncio.sleep(0)
    worker.engine.gate.set()
    await asyncio.gather(asked, *streams)
    assert worker.counts.remote == 0


async def test_a_client_that_leaves_takes_everything_with_it(worker: Worker) -> None:
    streams = await worker.harmable()
    asked = asyncio.create_task(worker.ask())
    while not worker.queue.server.entries:
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    await worker.remote.finish()
    assert not worker.queue.server.entries
    assert worker.side.backlog_s(0.0) == 0.0
    worker.engine.gate.set()
    await asyncio.gather(*streams)


async def test_a_full_worker_says_when_its_prefills_are_through(worker: Worker) -> None:
    worker.engine.waiting = 9
    await worker.ask()
    worker.engine.waiting = 10
    for number in range(8):
        worker.side.began(str(number), 50_000, 0.0)
        worker.side.went_remote(str(number), 5.0, 0.0)
    with pytest.raises(WorkerBusy) as busy:
        await worker.ask()
    assert busy.value.details["retry_after_s"] == pytest.approx(40.0)
    for number in range(8, 20):
        worker.side.began(str(number), 50_000, 0.0)
        worker.side.went_remote(str(number), 5.0, 0.0)
    with pytest.raises(WorkerBusy) as busy:
        await worker.ask()
    assert busy.value.details["retry_after_s"] == RETRY_AFTER_MAX_S


async def test_a_prompt_that_cannot_travel_is_prefilled_here(worker: Worker) -> None:
    await worker.harmable()
    worker.engine.gate.set()
    asked = len(worker.engine.asked)
    await worker.ask("elsewhere", core=[b"words"], prefill_here="its blocks are salted")
    (request,) = worker.engine.asked[asked:]
    assert (request.core, request.kv_transfer_params) == ([b"words"], None)
    assert not worker.queue.server.entries
    assert worker.counts.prefills.by["local", Why.CANNOT_TRAVEL] == 1
