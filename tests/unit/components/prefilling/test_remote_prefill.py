"""The decode side of a remote prefill: the queue gauge, and every way to end up prefilling locally."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.components import messages, remote_prefill
from dynamo_local.components.remote_prefill import QueueGauge, RemotePrefill
from dynamo_local.core.routing import disagg
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.core.types import Missing
from dynamo_local.errors import EngineError, KillsWorkers
from dynamo_local.ports import EngineRequest, QueueDepth, SamplingParams
from tests.drivers.eventually import eventually
from tests.fakes.data_plane.worker_context import FakePrefillReplies
from tests.fakes.infra.prefill_queue import FakePrefillQueue


class CountingQueue(FakePrefillQueue):
    """Counts how often its depth is asked; `hold` lets it not answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked = 0
        self.hold: asyncio.Event | None = None

    async def depth(self) -> QueueDepth:
        self.asked += 1
        if self.hold is not None:
            await self.hold.wait()
        return await super().depth()


def request(request_id: str = "r", tokens: int = 100) -> EngineRequest:
    return EngineRequest(request_id, list(range(tokens)), SamplingParams(max_tokens=5))


def make(queue: FakePrefillQueue, **options: Any) -> tuple[RemotePrefill, FakePrefillReplies]:
    """A decode side with one prefill worker registered, and the replies that it waits on."""
    replies = FakePrefillReplies({}, "decode")
    given: dict[str, Any] = {
        "settings": lambda: DisaggSettings(10, 2),
        "prefill_workers": lambda: 1,
        "conditional": True,
        "timeout_s": 0.05,
        **options,
    }
    return RemotePrefill(queue, replies, **given), replies


async def test_a_burst_asks_the_queue_once() -> None:
    """Fifty requests at once share one sample; it is fresh for a while."""
    queue = CountingQueue()
    gauge = QueueGauge(queue, AsyncioClock())
    assert await asyncio.gather(*(gauge.pending() for _ in range(50))) == [0] * 50
    assert queue.asked == 1
    await gauge.close()


async def test_own_entries_count_until_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was enqueued since the sample is added to it, and not twice after the next."""
    monkeypatch.setattr(disagg, "DEPTH_MAX_AGE_S", 0.02)
    queue = CountingQueue()
    gauge = QueueGauge(queue, AsyncioClock())
    assert await gauge.pending() == 0
    await queue.enqueue("a", {}, deadline_s=5)
    gauge.enqueued()
    assert await gauge.pending() == 1
    await asyncio.sleep(0.03)
    assert await gauge.pending() == 1
    assert queue.asked == 2
    await gauge.close()


async def test_an_unknown_depth_is_missing_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer, or an outage, is Missing with its reason."""
    monkeypatch.setattr(remote_prefill, "DEPTH_TIMEOUT_S", 0.02)
    silent = CountingQueue()
    silent.hold = asyncio.Event()
    away = CountingQueue()
    away.server.available = False
    for queue, word in ((silent, "no answer"), (away, "switched off")):
        gauge = QueueGauge(queue, AsyncioClock())
        value = await gauge.pending()
        assert isinstance(value, Missing)
        assert word in value.reason
        await gauge.close()


async def test_one_callers_cancellation_leaves_the_sample_to_the_others() -> None:
    queue = CountingQueue()
    queue.hold = asyncio.Event()
    gauge = QueueGauge(queue, AsyncioClock())
    leaving, staying = asyncio.create_task(gauge.pending()), asyncio.create_task(gauge.pending())
    await eventually(lambda: queue.asked)
    leaving.cancel()
    queue.hold.set()
    assert await staying == 0
    assert queue.asked == 1
    await gauge.close()


async def test_a_burst_does_not_overfill_the_queue() -> None:
    """Of ten long prompts at once no more go remote than max_prefill_queue_size lets through, one sample or not."""
    queue = CountingQueue()
    remote, _ = make(queue)
    for n in range(10):
        task = asyncio.create_task(remote.prefill(request(f"r{n}"), 0.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if n == 9:
            await task
    assert len(queue.server.seen) == 2
    while remote.waiting:
        await asyncio.sleep(0.01)
    await remote.finish()


async def test_the_kv_comes_back_unchanged() -> None:
    queue = FakePrefillQueue()
    remote, replies = make(queue, timeout_s=5)
    asked = asyncio.create_task(remote.prefill(request(), 0.0))
    pulled = await queue.pull(2)
    assert pulled is not None
    assert messages.parse_prefill_entry(pulled.task.payload).token_ids == list(range(100))
    await replies.send_reply("decode", "r", {"kv_transfer_params": {"remote_block_ids": [[1, 2]]}})
    assert await asked == {"remote_block_ids": [[1, 2]]}
    assert queue.server.entries  # acked by the prefill worker, not cancelled by us
    await remote.finish()


async def test_what_two_prefill_workers_died_of_is_not_computed_here() -> None:
    queue = FakePrefillQueue()
    remote, replies = make(queue, timeout_s=5)
    asked = asyncio.create_task(remote.prefill(request(), 0.0))
    await eventually(lambda: replies.awaited("r"))
    expected = replies.awaited("r")
    assert expected is not None
    for _ in range(2):
        expected.lose_holder()
    with pytest.raises(KillsWorkers):
        await asked
    await remote.finish()
    assert not queue.server.entries, "nobody else gets it"


@pytest.mark.parametrize("reply", [EngineError("broken"), {"no": "params"}, {"kv_transfer_params": None}])
async def test_a_useless_reply_means_local(reply: Any) -> None:
    queue = FakePrefillQueue()
    remote, replies = make(queue, timeout_s=5)
    asked = asyncio.create_task(remote.prefill(request(), 0.0))
    assert await queue.pull(2)
    await replies.send_reply("decode", "r", reply)
    assert await asked is None
    await remote.finish()


async def test_past_the_deadline_the_entry_is_taken_out() -> None:
    queue = FakePrefillQueue()
    remote, _ = make(queue)
    assert await remote.prefill(request(), 0.0) is None
    await remote.finish()
    assert not queue.server.entries
    assert remote.waiting == 0


async def test_a_cancelled_request_takes_its_entry_with_it() -> None:
    queue = FakePrefillQueue()
    remote, _ = make(queue, timeout_s=30)
    asked = asyncio.create_task(remote.prefill(request(), 0.0))
    while not queue.server.entries:
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    await remote.finish()
    assert not queue.server.entries
    assert remote.waiting == 0


async def test_kv_that_came_for_a_client_that_leaves_is_dropped() -> None:
    """It was accepted, so the prefill worker holds it for us: without that, until its lease ends."""
    checking, dropped = asyncio.Event(), list[Any]()

    async def check(_params: Any) -> None:
        checking.set()
        await asyncio.Event().wait()

    async def drop(of: EngineRequest, params: Any) -> None:
        dropped.append((of.request_id, params))

    queue = FakePrefillQueue()
    remote, replies = make(queue, timeout_s=30, check=check, drop=drop)
    asked = asyncio.create_task(remote.prefill(request(), 0.0))
    assert await queue.pull(2)
    await replies.send_reply("decode", "r", {"kv_transfer_params": {"remote_request_id": "p"}})
    await checking.wait()
    asked.cancel()
    await asyncio.wait([asked])
    await remote.finish()
    assert dropped == [("r", {"remote_request_id": "p"})]


async def test_a_prompt_too_large_for_nats_is_local() -> None:
    remote, _ = make(FakePrefillQueue())
    assert await remote.prefill(request(tokens=300_000), 0.0) is None
    await remote.finish()


@pytest.mark.parametrize(
    ("options", "hit_rate"),
    [({"prefill_workers": lambda: 0}, 0.0), ({"settings": lambda: DisaggSettings(100, 2)}, 0.0), ({}, 0.95)],
)
async def test_what_stays_local_is_never_enqueued(options: dict[str, Any], hit_rate: float) -> None:
    queue = FakePrefillQueue()
    remote, _ = make(queue, **options)
    assert await remote.prefill(request(), hit_rate) is None
    await remote.finish()
    assert not queue.server.seen


async def test_the_entry_says_how_much_of_the_prompt_the_decode_worker_has() -> None:
    queue = FakePrefillQueue()
    remote, _ = make(queue, settings=lambda: DisaggSettings(5, 2))
    asked = asyncio.create_task(remote.prefill(request(), 0.25))
    pulled = await queue.pull(5)
    assert pulled is not None
    assert messages.parse_prefill_entry(pulled.task.payload).cached_tokens == 25
    asked.cancel()
    await asyncio.wait([asked])
    await remote.finish()


async def test_each_decision_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    remote, _ = make(FakePrefillQueue(), settings=lambda: DisaggSettings(50, 2))
    await remote.prefill(request("r7"), 0.5)
    await remote.finish()
    assert "request r7: Remote prefill: False (prefill length: 50/100, prefill queue size: 0/2)" in caplog.text
