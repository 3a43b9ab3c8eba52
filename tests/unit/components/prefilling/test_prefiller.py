"""Tests what a prefill worker pulls, and what becomes of each entry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from dynamo_local.components import messages, prefill
from dynamo_local.components.prefill import Prefiller
from dynamo_local.errors import EngineError, InvalidRequest, RequestCancelled
from dynamo_local.ports import EngineOutput, EngineRequest, SamplingParams
from tests.drivers.eventually import eventually
from tests.fakes.data_plane.worker_context import FakePrefillReplies
from tests.fakes.infra.prefill_queue import FakePrefillQueue


class ScriptedEngine:
    """Each `generate` waits for `gate`, then gives KV or raises the next error of `errors`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.pulled = asyncio.Event()
        self.pulled.set()
        self.errors: list[Exception] = []
        self.released: list[str] = []
        self.requests: list[EngineRequest] = []
        self.running = 0
        self.most_running = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            if self.errors:
                raise self.errors.pop(0)
            yield EngineOutput((1,), "length", 0, {"remote_request_id": request.request_id})
        finally:
            self.running -= 1

    async def wait_handoffs(self) -> None:
        await self.pulled.wait()

    def release_handoff(self, params: Mapping[str, Any]) -> None:
        self.released.append(params["remote_request_id"])


class Bench:
    """A prefiller at work, and the decode side that asks it."""

    def __init__(self, ack_wait_s: float, **options: Any) -> None:
        self.engine = ScriptedEngine()
        self.queue = FakePrefillQueue(ack_wait_s=ack_wait_s)
        switchboard: dict[str, FakePrefillReplies] = {}
        self.decode = FakePrefillReplies(switchboard, "decode")
        self.replies = FakePrefillReplies(switchboard, "prefill")
        self.stop = asyncio.Event()
        self.subject = Prefiller(self.engine, self.queue, self.replies, **options)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.pull_and_finish())

    async def pull_and_finish(self) -> None:
        await self.subject.pull(self.stop)
        await self.subject.finish()

    async def ask(self, request_id: str, payload: dict[str, Any] | None = None) -> None:
        request = EngineRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=9, min_tokens=4))
        entry = messages.prefill_entry(request, "decode") if payload is None else payload
        await self.queue.enqueue(request_id, entry, deadline_s=30)

    async def close(self) -> None:
        self.engine.gate.set()
        self.engine.pulled.set()
        self.stop.set()
        await asyncio.wait_for(self.task, 5)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """One entry at a time; what is given back comes again almost at once."""
    monkeypatch.setattr(prefill, "NAK_DELAY_S", 0.01)
    made = Bench(ack_wait_s=5.0)
    yield made
    await made.close()


async def test_a_prefill_computes_one_token_and_hands_over_its_kv(bench: Bench) -> None:
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        params = messages.parse_prefill_reply(await expected.wait(5)).kv_transfer_params
    (request,) = bench.engine.requests
    assert params == {"remote_request_id": request.request_id}
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (1, 0)
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_decode"] is True
    await eventually(lambda: not bench.queue.server.entries)
    assert bench.subject.counts.done == 1


async def test_tokens_that_only_the_decode_worker_has_are_counted_as_computed_again(bench: Bench) -> None:
    asked = EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=9))
    with bench.decode.expect("r") as expected:
        await bench.ask("r", messages.prefill_entry(asked, "decode", cached_tokens=2))
        await expected.wait(5)
    assert bench.subject.counts.recomputed_tokens == 2


async def test_only_what_can_start_now_is_pulled(bench: Bench) -> None:
    bench.engine.gate.clear()
    for n in range(3):
        await bench.ask(f"r{n}")
    await eventually(lambda: bench.engine.running == 1)
    assert (await bench.queue.depth()).pending == 2
    bench.engine.gate.set()
    await eventually(lambda: not bench.queue.server.entries)
    assert bench.engine.most_running == 1


async def test_more_entries_share_passes_by_option() -> None:
    bench = Bench(ack_wait_s=5.0, max_concurrent_prefills=2)
    bench.engine.gate.clear()
    for n in range(3):
        await bench.ask(f"r{n}")
    await eventually(lambda: bench.engine.running == 2)
    assert (await bench.queue.depth()).pending == 1
    await bench.close()
    assert bench.engine.most_running == 2


async def test_the_next_prefill_goes_on_during_a_hand_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    confirm, send = asyncio.Event(), bench.replies.send_reply

    async def slow_send(subject: str, request_id: str, result: Any) -> None:
        if request_id == "first":
            await confirm.wait()
        await send(subject, request_id, result)

    monkeypatch.setattr(bench.replies, "send_reply", slow_send)
    with bench.decode.expect("first") as first, bench.decode.expect("second") as second:
        await bench.ask("first")
        await bench.ask("second")
        assert await second.wait(5)
        await eventually(lambda: [key[1] for key in bench.queue.server.entries] == ["first"])
        confirm.set()
        assert await first.wait(5)


async def test_a_failed_prefill_is_given_back_and_done_again(bench: Bench) -> None:
    """An engine's failure is a nak, not an ack: the entry is delivered again."""
    bench.engine.errors = [EngineError("out of luck")]
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        assert await expected.wait(5)
    assert len({request.request_id for request in bench.engine.requests}) == 2
    assert (bench.subject.counts.given_back, bench.subject.counts.done) == (1, 1)


async def test_an_unexpected_failure_does_not_end_the_worker(bench: Bench) -> None:
    """A defect is logged and its entry given back; the loop goes on."""
    bench.engine.errors = [RuntimeError("a defect")]
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        assert await expected.wait(5)
    assert bench.subject.counts.given_back == 1


async def test_what_never_stops_failing_becomes_a_dead_letter(bench: Bench) -> None:
    """An entry that kills every attempt ends where it can be seen, and holds nobody up."""
    bench.engine.errors = [EngineError("always") for _ in range(bench.queue.max_deliver)]
    await bench.ask("poison")
    await eventually(lambda: bool(bench.queue.server.dead))
    assert bench.queue.server.dead[0].request_id == "poison"
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        assert await expected.wait(5)


async def test_what_no_worker_can_do_is_told_at_once(bench: Bench) -> None:
    """A prompt that the engine refuses is answered with its error and acked: no redelivery would help."""
    bench.engine.errors = [InvalidRequest("too long", param="prompt")]
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        with pytest.raises(InvalidRequest, match="too long"):
            await expected.wait(5)
    await eventually(lambda: not bench.queue.server.entries)
    assert (bench.subject.counts.refused, bench.subject.counts.done) == (1, 0)


async def test_an_entry_that_cannot_be_read_is_dropped(bench: Bench) -> None:
    await bench.ask("r", payload={"nonsense": 1})
    await eventually(lambda: bench.subject.counts.refused == 1 and not bench.queue.server.entries)
    assert bench.engine.requests == []


async def test_nothing_is_computed_for_a_decode_worker_that_is_gone(bench: Bench) -> None:
    bench.decode.close()
    await bench.ask("r")
    await eventually(lambda: bench.subject.counts.unwanted == 1 and not bench.queue.server.entries)
    assert bench.engine.requests == []


async def test_a_reply_that_nobody_wants_is_acked(bench: Bench) -> None:
    """The decode side has given up: the entry is finished, not repeated, and no drain waits for its KV."""
    await bench.ask("r")
    await eventually(lambda: not bench.queue.server.entries)
    assert (bench.subject.counts.unwanted, bench.subject.counts.given_back) == (1, 0)
    assert bench.engine.released == [request.request_id for request in bench.engine.requests]
    with pytest.raises(RequestCancelled):
        await bench.replies.send_reply("decode", "r", {})


async def test_a_long_prefill_stays_this_workers() -> None:
    """`in_progress` while it computes: three ack_waits later nobody else was given the entry."""
    bench = Bench(ack_wait_s=0.1)
    bench.engine.gate.clear()
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        await eventually(lambda: bench.engine.running == 1)
        assert await FakePrefillQueue(bench.queue.server, ack_wait_s=0.1).pull(0.3) is None
        bench.engine.gate.set()
        assert await expected.wait(5)
    await bench.close()


async def test_an_outage_of_the_queue_is_survived(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "RETRY_PAUSE_S", 0.01)
    bench.queue.server.available = False
    bench.queue.server.notify()
    await asyncio.sleep(0.05)
    bench.queue.server.available = True
    with bench.decode.expect("r") as expected:
        await bench.ask("r")
        assert await expected.wait(5)


async def test_a_drain_finishes_what_is_pulled_and_waits_for_the_hand_offs(bench: Bench) -> None:
    """Nothing new is pulled, the computation ends and is answered, the KV is waited for."""
    bench.engine.gate.clear()
    bench.engine.pulled.clear()
    with bench.decode.expect("r0") as expected:
        await bench.ask("r0")
        await bench.ask("r1")
        await eventually(lambda: bench.engine.running == 1)
        bench.stop.set()
        bench.engine.gate.set()
        assert await expected.wait(5)
    await eventually(lambda: bench.subject.in_hand == 0)
    assert not bench.task.done()
    bench.engine.pulled.set()
    await asyncio.wait_for(bench.task, 5)
    assert (await bench.queue.depth()).pending == 1


async def test_an_idle_worker_drains_at_once(bench: Bench) -> None:
    await asyncio.sleep(0.01)
    bench.stop.set()
    await asyncio.wait_for(bench.task, 0.5)


async def test_a_drain_that_is_taken_back_loses_nothing_and_pulls_again(bench: Bench) -> None:
    bench.engine.gate.clear()
    with bench.decode.expect("r0") as first, bench.decode.expect("r1") as second:
        await bench.ask("r0")
        await bench.ask("r1")
        await eventually(lambda: bench.engine.running == 1)
        bench.stop.set()
        await eventually(lambda: (bench.subject.request_ids, bench.engine.running) == (("r0",), 1))
        bench.task.cancel()  # the drain is cancelled while it waits for what is in hand
        await asyncio.wait([bench.task])
        bench.stop.clear()
        bench.task = asyncio.create_task(bench.pull_and_finish())
        bench.engine.gate.set()
        assert await first.wait(5)
        assert await second.wait(5)
    assert (bench.subject.counts.done, bench.subject.counts.given_back) == (2, 0)


async def test_a_stop_that_is_taken_back_at_once_still_ends_the_pull(bench: Bench) -> None:
    """Whoever resumes starts a pull of its own: the old one must not go on beside it, nor spin."""
    await asyncio.sleep(0.01)
    bench.stop.set()
    bench.stop.clear()
    await asyncio.wait_for(bench.task, 0.5)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("passes", range(8))
async def test_a_stop_between_two_pulls_ends_the_pull(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many passes of the event loop after a pull came back empty. It once span here, and nothing else ran."""
    bench, stop = Bench(ack_wait_s=5.0), asyncio.Event()
    stopping: list[asyncio.Task[None]] = []

    async def stop_soon() -> None:
        for _ in range(passes):
            await asyncio.sleep(0)
        stop.set()

    async def empty(timeout_s: float) -> None:
        stopping.append(asyncio.create_task(stop_soon()))

    await bench.close()
    monkeypatch.setattr(bench.queue, "pull", empty)
    await bench.subject.pull(stop)
    await asyncio.wait(stopping)


async def test_a_cancelled_worker_gives_back_what_it_holds() -> None:
    bench = Bench(ack_wait_s=60.0)
    bench.engine.gate.clear()
    await bench.ask("r")
    await eventually(lambda: bench.engine.running == 1)
    bench.task.cancel()
    await asyncio.wait([bench.task])
    await bench.subject.give_back()
    again = await FakePrefillQueue(bench.queue.server).pull(2.0)
    assert again is not None
    assert again.task.attempt == 2
