"""The cost of forward-pass metrics: in an engine per pass, in a worker per answer, in the arbiter per pull."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from benchmarks.harness import Report, at_most
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.engines.sim.requests import SchedulerConfig, SimRequest
from dynamo_local.engines.sim.scheduler import PassDone, SimScheduler
from dynamo_local.engines.vllm.pass_watch import PassWatch
from dynamo_local.planner.sources import PassTracker, ReadyWorker
from dynamo_local.profile.interpolation import FixedModel
from dynamo_local.transport.fpm import decode_pass, encode_pass
from dynamo_local.transport.observation import MAX_PASSES, parse_answer
from dynamo_local.transport.passes import PassRecorder, seal, unseal

WORKERS, PASSES_PER_S, PULL_EVERY_S = 64, 200, 5.0
PASS_US = 10_000.0
"""A decode pass of a real model on a GPU takes ten milliseconds, or more with many requests."""
ANSWER_US = 5000.0
"""The arbiter's loop is never held for longer."""
DECODING = Requests(num_decode_requests=128, sum_decode_kv_tokens=400_000, var_decode_kv_tokens=1234.5)
QUEUED = Requests(num_prefill_requests=7, sum_prefill_tokens=14_000, var_prefill_length=55.5)


def run(short: bool) -> Report:
    """Best of many calls in each round: what the code needs, not what else ran."""
    report = Report("passes")
    rounds, calls = (3, 100) if short else (9, 1000)

    def measure(name: str, call: Callable[[], object], most_us: float | None = None, per: int = 1) -> None:
        samples = [min(_timed_us(call) for _ in range(calls)) / per for _ in range(rounds)]
        report.add(name, "us", samples, None if most_us is None else at_most(most_us))

    for batch in (1, 64, 256):
        measure(f"vLLM's scheduler, a pass of {batch} decodes", _vllm_pass(batch), PASS_US / 100)
    measure("the same, a queue of 10,000 behind it", _vllm_pass(64, waiting=10_000), PASS_US / 100)
    passed = ForwardPass(EngineId("7587884888361987"), 4711, 0.0123, DECODING, QUEUED)
    message = seal(encode_pass(passed), publisher_id=1, sequence=1, wall_s=1.0)
    measure("writing a pass in Dynamo's format, in its envelope", lambda: seal(encode_pass(passed), **_ENVELOPE))
    measure("reading it", lambda: decode_pass(unseal(message) or b""))
    answer = _answer(passed)
    measure("a worker's answer: 64 passes of 1,000", _telling(), 5000.0)
    measure("the arbiter reads one answer", lambda: parse_answer(answer, 100.0), ANSWER_US)
    tracking = _tracking(answer)
    measure("and follows it", tracking, ANSWER_US)
    plain, watched = (_sim_pass_us(rounds, watch=watch) for watch in (False, True))
    report.add("the simulated engine, a pass of 64 decodes", "us", plain)
    report.add("the same, watched", "us", watched)
    one_us = min(_timed_us(tracking) for _ in range(calls))
    share = one_us * WORKERS / (PULL_EVERY_S * 1e6) * 100
    report.notes.append(
        f"{WORKERS} workers at {PASSES_PER_S} passes/s, asked every {PULL_EVERY_S:g} s: {share:.2f} % of the arbiter's "
        f"core beside NATS; an answer has {len(answer)} bytes"
    )
    return report


_ENVELOPE: dict[str, Any] = {"publisher_id": 1, "sequence": 1, "wall_s": 1.0}


def _vllm_pass(batch: int, waiting: int = 0) -> Callable[[], None]:
    """Notes one pass, between its schedule and its result."""
    requests = {f"request-{n}": _request(1000 + n) for n in range(batch)}
    queue = [_request(500) for _ in range(waiting)]
    scheduler = SimpleNamespace(requests=requests, waiting=queue, kv_holding_waiting=())
    watch = PassWatch(scheduler, 0, lambda _message: None)
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(requests, 1), total_num_scheduled_tokens=batch)

    def once() -> None:
        watch.scheduled(output)
        watch.ended(output)

    return once


class _Request:
    """With `num_tokens` as vLLM's, which counts a list."""

    def __init__(self, tokens: int) -> None:
        self.num_computed_tokens = tokens
        self.num_prompt_tokens = tokens - 1
        self.num_output_tokens = 0
        self.status = SimpleNamespace(name="WAITING")
        self._all_token_ids = [0] * tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self._all_token_ids)


def _request(tokens: int) -> _Request:
    return _Request(tokens)


def _telling() -> Callable[[], object]:
    """All that a worker does for one answer, but for NATS."""
    recorder = PassRecorder()
    for n in range(int(PASSES_PER_S * PULL_EVERY_S)):
        recorder.record(ForwardPass(EngineId(""), n, 0.005, DECODING, QUEUED, n * 0.005))
    return lambda: [(1.0, encode_pass(one, "7587884888361987")) for one in recorder.since({}, MAX_PASSES)]


def _answer(passed: ForwardPass) -> bytes:
    passes = [(1.0, encode_pass(passed)) for _ in range(MAX_PASSES)]
    return msgspec.msgpack.encode(
        {"watcher": "dynamo_VllmWorker", "component": "VllmWorker", "epoch": "e", "up_s": 9.0, "passes": passes}
    )


def _tracking(answer: bytes) -> Callable[[], None]:
    """All that the arbiter does with one answer, from its bytes to the policy's values."""
    tracker = PassTracker()
    ready = (ReadyWorker("dynamo_VllmWorker", "VllmWorker", "7"),)

    def once() -> None:
        heard = parse_answer(answer, 100.0)
        assert heard is not None
        tracker.heard(heard.watcher, heard.passes)
        tracker.take(ready, 100.0)

    return once


def _sim_pass_us(rounds: int, *, watch: bool) -> list[float]:
    """Pass by pass, as an engine in real time goes."""
    samples = []
    for _ in range(rounds):
        watched: list[PassDone] | None = [] if watch else None
        config = SchedulerConfig(num_gpu_blocks=100_000, block_size=64)
        scheduler = SimScheduler(config, FixedModel(), watch=watched)
        for n in range(64):
            scheduler.submit(SimRequest(f"r{n}", 100, 500), 0.0)
        at_s, passes, began = scheduler.next_event_at(), 0, time.perf_counter()
        while at_s is not None:
            scheduler.advance(at_s)
            at_s, passes = scheduler.next_event_at(), passes + 1
        samples.append((time.perf_counter() - began) * 1e6 / passes)
    return samples


def _timed_us(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6
