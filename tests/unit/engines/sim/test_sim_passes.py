"""Tests what the simulated engine tells of its passes."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.core.passes import NONE, Requests
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.requests import SchedulerConfig, SimRequest
from dynamo_local.engines.sim.scheduler import PassDone, SimScheduler
from dynamo_local.engines.sim.transfers import InMemoryTransport
from dynamo_local.ports import EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import FixedModel
from dynamo_local.transport.passes import PassRecorder

PERF = FixedModel(prefill_ms_per_token=1.0, decode_ms=10.0)


def run(*requests: SimRequest, until_s: float = 100.0, coalesce: bool = True, **config: int) -> list[PassDone]:
    """All requests at once, to their end."""
    watch: list[PassDone] = []
    shape = SchedulerConfig(**{"num_gpu_blocks": 100, "block_size": 16, **config}, coalesce=coalesce)
    scheduler = SimScheduler(shape, PERF, watch=watch)
    for request in requests:
        scheduler.submit(request, 0.0)
    at_s = scheduler.next_event_at(quiet=True)
    while at_s is not None and at_s <= until_s:
        scheduler.advance(at_s)
        at_s = scheduler.next_event_at(quiet=True)
    return watch


def test_a_prefill_and_its_decodes() -> None:
    first, *decodes = run(SimRequest("a", 40, 4))
    assert first.scheduled == Requests(num_prefill_requests=1, sum_prefill_tokens=40)
    assert first.wall_time_s == pytest.approx(0.04)
    assert [done.scheduled for done in decodes] == [
        Requests(num_decode_requests=1, sum_decode_kv_tokens=kv) for kv in (41, 42, 43)
    ]
    assert [done.wall_time_s for done in decodes] == pytest.approx([0.01] * 3)


def test_chunks_count_what_they_compute_and_what_they_read() -> None:
    passes = run(SimRequest("a", 40, 1), max_num_batched_tokens=16)
    assert [(p.scheduled.sum_prefill_tokens, p.scheduled.sum_prefill_kv_tokens) for p in passes] == [
        (16, 0),
        (16, 16),
        (8, 32),
    ]
    assert all(p.scheduled.num_prefill_requests == 1 for p in passes)


def test_variances_are_of_whole_prompts_and_of_contexts() -> None:
    first, second = run(SimRequest("a", 20, 2), SimRequest("b", 40, 2))
    assert first.scheduled.var_prefill_length == 100.0
    assert (second.scheduled.num_decode_requests, second.scheduled.sum_decode_kv_tokens) == (2, 62)
    assert second.scheduled.var_decode_kv_tokens == 100.0


def test_what_waits_is_queued_as_prompts() -> None:
    passes = run(SimRequest("a", 20, 3), SimRequest("b", 40, 1), SimRequest("c", 60, 1), max_num_seqs=1)
    assert passes[0].queued == Requests(num_prefill_requests=2, sum_prefill_tokens=100, var_prefill_length=100.0)
    assert passes[-1].queued == NONE


def test_what_was_preempted_or_waits_for_kv_is_queued_as_decodes() -> None:
    crowded = run(SimRequest("a", 30, 40), SimRequest("b", 30, 40), num_gpu_blocks=5)
    assert max(done.queued.num_decode_requests for done in crowded) == 1
    pulling = run(SimRequest("a", 30, 4), SimRequest("p", 50, 4, pull_kv=True), until_s=1.0)
    assert pulling[-1].queued == Requests(num_decode_requests=1, sum_decode_kv_tokens=50)


def test_quiet_runs_tell_the_same_as_pass_by_pass() -> None:
    requests = [SimRequest(f"r{n}", 10 + 7 * n, 5 + 11 * n) for n in range(6)]
    quiet, single = (run(*requests, num_gpu_blocks=30, coalesce=coalesce) for coalesce in (True, False))
    assert [p[2:] for p in quiet] == [p[2:] for p in single]
    assert [p.end_s for p in quiet] == pytest.approx([p.end_s for p in single])
    assert len(quiet) > 40


# --- the engine ------------------------------------------------------------------------------------


def engine_with(recorder: PassRecorder) -> SimEngine:
    return SimEngine(SimOptions(num_gpu_blocks=400), perf_model=PERF, transport=InMemoryTransport(), passes=recorder)


async def generate(engine: SimEngine, tokens: int) -> None:
    sampling = SamplingParams(tokens, ignore_eos=True)
    async for _ in engine.generate(EngineRequest("r", tuple(range(300, 340)), sampling)):
        pass


def test_each_pass_is_recorded_and_numbered() -> None:
    async def scenario() -> PassRecorder:
        recorder = PassRecorder()
        engine = engine_with(recorder)
        await engine.start()
        await generate(engine, 20)
        await engine.close()
        return recorder

    passes = run_virtual(scenario()).since({}, 1000)
    assert [one.counter_id for one in passes] == list(range(1, 21))
    assert sum(one.scheduled.num_decode_requests for one in passes) == 19


def test_an_idle_engine_says_so_each_second() -> None:
    async def scenario() -> list[float]:
        recorder, at_s = PassRecorder(), list[float]()
        recorder.listeners.append(lambda one: at_s.append(one.at_s) if one.heartbeat else None)
        engine = engine_with(recorder)
        await engine.start()
        await asyncio.sleep(5.5)
        await engine.close()
        await asyncio.sleep(5.0)
        return at_s

    assert run_virtual(scenario()) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])


def test_an_engine_in_a_long_pass_does_not_look_idle() -> None:

    async def scenario() -> PassRecorder:
        recorder = PassRecorder()
        slow = FixedModel(prefill_ms_per_token=100.0, decode_ms=10.0)
        engine = SimEngine(
            SimOptions(num_gpu_blocks=400), perf_model=slow, transport=InMemoryTransport(), passes=recorder
        )
        await engine.start()
        first = asyncio.create_task(generate(engine, 1))
        await asyncio.sleep(2.0)
        second = asyncio.create_task(generate(engine, 1))
        await asyncio.sleep(1.5)
        last = recorder.last()
        assert last is not None
        assert last.heartbeat
        assert last.scheduled == Requests(num_prefill_requests=1, sum_prefill_tokens=40)
        assert last.queued == Requests(num_prefill_requests=1, sum_prefill_tokens=40)
        await asyncio.gather(first, second)
        await engine.close()
        return recorder

    assert [one.wall_time_s for one in run_virtual(scenario()).since({}, 10)] == pytest.approx([4.0, 4.0])


def test_whoever_asks_gets_the_passes_of_this_moment() -> None:
    """Also where the engine wakes only once per run of quiet passes."""

    async def scenario() -> int:
        recorder = PassRecorder()
        options = SimOptions(num_gpu_blocks=400, coalesce_passes=True)
        engine = SimEngine(options, perf_model=PERF, transport=InMemoryTransport(), passes=recorder)
        await engine.start()
        asking = asyncio.create_task(generate(engine, 60))
        await asyncio.sleep(0.345)
        told = len(recorder.since({}, 100))
        await asking
        await engine.close()
        return told

    assert run_virtual(scenario()) == 31  # the prefill took 40 ms


def test_prefix_hits_are_counted() -> None:
    async def scenario() -> dict[str, float]:
        engine = SimEngine(
            SimOptions(num_gpu_blocks=400, block_size=16), perf_model=PERF, transport=InMemoryTransport()
        )
        await engine.start()
        await generate(engine, 2)
        await generate(engine, 2)
        counted = dict(engine.counters())
        await engine.close()
        return counted

    assert run_virtual(scenario()) == {"prefix_queries": 80, "prefix_hits": 32}


def test_the_accept_length_is_measured_from_what_was_emitted() -> None:
    """The planner gets 1 + accepted / drafts. The answer is that of an engine without speculation."""

    async def scenario(accept_length: float) -> tuple[list[int], dict[str, float]]:
        options = SimOptions(num_gpu_blocks=400, accept_length=accept_length)
        engine = SimEngine(options, perf_model=PERF, transport=InMemoryTransport())
        await engine.start()
        request = EngineRequest("r", list(range(40)), SamplingParams(max_tokens=101, ignore_eos=True))
        tokens = [token async for output in engine.generate(request) for token in output.token_ids]
        counted = dict(engine.counters())
        await engine.close()
        return tokens, counted

    plain, _ = run_virtual(scenario(1.0))
    tokens, counted = run_virtual(scenario(2.5))
    assert tokens == plain
    assert 1 + counted["accepted"] / counted["drafts"] == 2.5
