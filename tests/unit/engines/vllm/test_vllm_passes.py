"""Tests what is told of vLLM's passes, with a scheduler that has the attributes of vLLM's; no vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_local.core.passes import NONE, EngineId, ForwardPass, Requests
from dynamo_local.engines.vllm.engine import received, watch_passes
from dynamo_local.engines.vllm.pass_watch import PassWatch, queued_numbers, scheduled_numbers


def request(prompt: int, computed: int = 0, output: int = 0, status: str = "WAITING") -> Any:
    return SimpleNamespace(
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_output_tokens=output,
        num_tokens=prompt + output,
        status=SimpleNamespace(name=status),
    )


class Engine:
    """A `PassWatch` on a clock of the test's, and what the worker gets from it."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={}, waiting=[], kv_holding_waiting=[])
        self.now_s = 100.0
        self.told: list[ForwardPass] = []
        self.messages = 0
        self.watch = PassWatch(self.scheduler, 1, self._arrived, lambda: self.now_s)

    def _arrived(self, message: bytes) -> None:
        self.messages += 1
        received(message, self.told.append, self.now_s)

    def schedule(self, **tokens: int) -> Any:
        output = SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))
        for name, count in tokens.items():
            self.scheduler.requests[name].num_computed_tokens += count
        self.watch.scheduled(output)
        return output

    def finish(self, output: Any, after_s: float) -> None:
        self.now_s += after_s
        self.watch.ended(output)


def scheduled(requests: dict[str, Any], **tokens: int) -> Requests:
    """After the scheduler has counted them as computed."""
    for name, count in tokens.items():
        requests[name].num_computed_tokens += count
    return Requests(*scheduled_numbers(requests, tokens))


def test_prompts_and_chunks_of_them_are_prefills() -> None:
    requests = {"a": request(100), "b": request(300, computed=128)}
    assert scheduled(requests, a=100, b=64) == Requests(
        num_prefill_requests=2, sum_prefill_tokens=164, var_prefill_length=10_000.0, sum_prefill_kv_tokens=128
    )


def test_a_last_token_is_a_decode_whatever_came_before() -> None:
    """A request that decodes, one whose KV came from another engine, one whose prompt was cached, and one that is
    scheduled again before its last token has come (asynchronous scheduling), with two speculative tokens."""
    requests = {
        "decodes": request(10, computed=14, output=5),
        "pulled": request(20, computed=19),
        "ahead": request(30, computed=32, output=2),
    }
    assert scheduled(requests, decodes=1, pulled=1, ahead=3) == Requests(
        num_decode_requests=3, sum_decode_kv_tokens=15 + 20 + 35, var_decode_kv_tokens=pytest.approx(72.2222, abs=1e-4)
    )


def test_what_was_preempted_is_computed_again_as_a_prefill() -> None:
    assert scheduled({"a": request(100, output=50)}, a=150).sum_prefill_tokens == 150


def test_the_queue_has_prompts_and_decodes() -> None:
    waiting = [request(100), request(300), request(50, output=10), request(40, status="WAITING_FOR_REMOTE_KVS")]
    assert Requests(*queued_numbers([waiting, ()])) == Requests(
        num_prefill_requests=2,
        sum_prefill_tokens=400,
        var_prefill_length=10_000.0,
        num_decode_requests=2,
        sum_decode_kv_tokens=100,
        var_decode_kv_tokens=100.0,
    )


def test_a_pass_lasts_from_the_result_before_it_or_from_its_schedule_after_idleness() -> None:
    engine = Engine()
    engine.scheduler.requests = {"a": request(64), "b": request(32)}
    first = engine.schedule(a=64)
    second = engine.schedule(b=32)
    engine.finish(first, 0.3)
    engine.finish(second, 0.2)
    engine.watch.tell()
    assert [one.wall_time_s for one in engine.told] == pytest.approx([0.3, 0.2])
    assert [one.at_s for one in engine.told] == pytest.approx([100.3, 100.5])
    assert [one.scheduled.sum_prefill_tokens for one in engine.told] == [64, 32]
    assert [(one.engine, one.counter_id) for one in engine.told] == [(EngineId("", 1), 1), (EngineId("", 1), 2)]
    engine.now_s += 60.0
    engine.scheduler.requests = {"c": request(16)}
    third = engine.schedule(c=16)
    engine.finish(third, 0.1)
    engine.watch.tell()
    assert engine.told[-1].wall_time_s == pytest.approx(0.1)


def test_passes_travel_together_and_empty_ones_not_at_all() -> None:
    engine = Engine()
    for n in range(20):
        engine.scheduler.requests = {"a": request(8)}
        engine.finish(engine.schedule(a=8), 0.005)
        engine.finish(engine.schedule(), 0.0)
        assert len(engine.told) == 0, n
    engine.watch.tell()
    assert (len(engine.told), engine.messages) == (20, 1)


def test_each_second_without_a_pass_has_a_heartbeat() -> None:
    engine = Engine()
    for _ in range(13):
        engine.now_s += 0.25
        engine.watch.tell()
    assert [(one.heartbeat, one.scheduled, one.queued) for one in engine.told] == [(True, NONE, NONE)] * 3


def test_in_a_long_pass_the_heartbeat_says_what_is_computed_and_what_waits() -> None:
    engine = Engine()
    engine.scheduler.requests = {"a": request(9000)}
    engine.scheduler.waiting = [request(500)]
    output = engine.schedule(a=9000)
    engine.now_s += 5.0
    engine.watch.tell()
    (beat,) = engine.told
    assert beat.heartbeat
    assert beat.scheduled == Requests(num_prefill_requests=1, sum_prefill_tokens=9000)
    assert beat.queued == Requests(num_prefill_requests=1, sum_prefill_tokens=500)
    engine.finish(output, 1.0)
    engine.watch.tell()
    assert engine.told[-1].wall_time_s == pytest.approx(6.0)


def test_a_long_queue_is_not_counted_at_each_pass() -> None:
    looks = 0

    class Queue(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looks
            looks += 1
            engine.now_s += 0.001
            return super().__iter__()

    engine = Engine()
    engine.scheduler.waiting = Queue([request(8)])
    for _ in range(200):
        engine.scheduler.requests = {"a": request(8)}
        engine.finish(engine.schedule(a=8), 0.01)
    assert 8 <= looks <= 12


def test_a_scheduler_of_another_shape_is_not_watched_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.scheduler.requests = {"a": request(8)}
    del engine.scheduler.requests["a"].num_prompt_tokens, engine.scheduler.requests["a"].num_tokens
    for _ in range(3):
        engine.finish(engine.schedule(a=8), 5.0)
        engine.watch.tell()
    assert engine.told == []
    assert [record.message for record in caplog.records] == [
        "this vLLM's passes cannot be watched; planners will know nothing of them"
    ]


@pytest.mark.parametrize("message", [b"", b"\xc1", msgspec.msgpack.encode([0, [[1, 2.0]]])])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        received(message, lambda _pass: None, 0.0)


@pytest.mark.parametrize(
    ("before", "asynchronous", "after"),
    [
        (None, True, "dynamo_local.engines.vllm.watched_schedulers.WatchedAsyncScheduler"),
        (None, False, "dynamo_local.engines.vllm.watched_schedulers.WatchedScheduler"),
        ("mine.Scheduler", True, "mine.Scheduler"),
    ],
)
def test_vllm_keeps_the_kind_of_scheduler_that_it_would_have(
    before: str | None, asynchronous: bool, after: str
) -> None:
    chosen = SimpleNamespace(scheduler_cls=before, async_scheduling=asynchronous)
    assert watch_passes(SimpleNamespace(scheduler_config=chosen)) is (before is None)
    assert chosen.scheduler_cls == after
