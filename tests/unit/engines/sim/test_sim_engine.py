"""The simulated engine through the `Engine` Protocol, on a virtual clock: the same code as in real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.core.types import Load
from dynamo_local.engines import make_engine
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.tokens import expected_output, expected_tokens
from dynamo_local.engines.sim.transfers import InMemoryTransport
from dynamo_local.errors import ConfigError, EngineDead, EngineError, InvalidRequest
from dynamo_local.ports import Engine, EngineOutput, EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import FixedModel

PERF = FixedModel(prefill_ms_per_token=1, decode_ms=10)


def engine(transport: InMemoryTransport | None = None, **options: Any) -> SimEngine:
    """1 ms per prompt token, 10 ms per decode pass, blocks of 4."""
    defaults: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 250, "engine_id": "e"}
    return SimEngine(SimOptions(**{**defaults, **options}), transport=transport or InMemoryTransport(), perf_model=PERF)


def request(prompt: list[int], max_tokens: int = 10, name: str = "r", **sampling: Any) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens, **{"ignore_eos": True, **sampling}))


async def collect(of: Engine, what: EngineRequest) -> list[EngineOutput]:
    return [output async for output in of.generate(what)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def with_engine(body: Callable[[SimEngine], Awaitable[Any]], **options: Any) -> Any:
    """Run `body` on a started engine in virtual time."""

    async def main() -> Any:
        sim = engine(**options)
        await sim.start()
        try:
            return await body(sim)
        finally:
            await sim.close()

    return run_virtual(main())


async def test_no_task_sleeps_for_a_pass_of_less_than_a_microsecond() -> None:
    """It would cost more than the rest of a fast engine. uvloop's clock shows milliseconds, so it stands still here."""

    class StandingClock(AsyncioClock):
        sleeps = 0

        def now_s(self) -> float:
            return 1.0

        async def sleep_until(self, deadline_s: float) -> None:
            self.sleeps += 1

    clock = StandingClock()
    sim = SimEngine(SimOptions(speed=1e6), clock=clock, transport=InMemoryTransport(), perf_model=PERF)
    await sim.start()
    clock.sleeps = 0
    async with asyncio.timeout(5):
        for number in range(5):
            assert len(tokens_of(await collect(sim, request([1, 2, 3], 1, str(number))))) == 1
    assert clock.sleeps == 0
    await sim.close()


def test_tokens_come_one_pass_at_a_time_and_are_the_expected_ones() -> None:
    """20 prompt tokens: first token after 20 ms, then one every 10 ms; the last output says why it is the last."""

    async def body(sim: SimEngine) -> None:
        clock, times, outputs = AsyncioClock(), [], []
        async for output in sim.generate(request(list(range(20)), 4)):
            outputs.append(output)
            times.append(clock.now_s())
        assert times == pytest.approx([0.02, 0.03, 0.04, 0.05])
        assert tokens_of(outputs) == expected_tokens(range(20), 4)
        assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
        assert outputs[0].num_cached_tokens == 0

    with_engine(body)


def test_an_output_ends_where_its_prompt_says() -> None:

    async def body(sim: SimEngine) -> None:
        names = ("token_low", "token_high", "mean_output_tokens", "seed")
        oracle = {name: getattr(sim.options, name) for name in names}
        stop = tuple(expected_tokens([5], 3)[2:])
        for sampling in (
            {"max_tokens": 500, "ignore_eos": False},
            {"max_tokens": 5, "ignore_eos": False},
            {"max_tokens": 300, "ignore_eos": True},
            {"max_tokens": 300, "ignore_eos": False, "min_tokens": 200},
            {"max_tokens": 300, "ignore_eos": True, "stop_token_ids": stop},
        ):
            outputs = await collect(sim, request([5], **sampling))
            assert (tokens_of(outputs), outputs[-1].finish_reason) == expected_output([5], **oracle, **sampling)

    with_engine(body)


@pytest.mark.parametrize("coalesce", [False, True])
def test_many_streams_through_a_small_cache_are_all_right(coalesce: bool) -> None:

    async def body(sim: SimEngine) -> int:
        prompts = [[n % 3, *range(4 * (n % 5)), n] for n in range(40)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(sim, request(p, 12 + n % 9))) for n, p in enumerate(prompts)]
        for n, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            assert tokens_of(task.result()) == expected_tokens(prompt, 12 + n % 9)
        assert sim.load().kv_active_blocks == 0
        return sim.preemptions

    assert with_engine(body, num_gpu_blocks=30, max_num_seqs=16, coalesce_passes=coalesce) > 0


def test_coalescing_changes_how_outputs_are_grouped_and_nothing_else() -> None:

    async def body(sim: SimEngine) -> tuple[list[int], float, float, int]:
        clock, outputs, times = AsyncioClock(), [], []
        async for output in sim.generate(request(list(range(20)), 50)):
            outputs.append(output)
            times.append(clock.now_s())
        return tokens_of(outputs), times[0], times[-1], len(outputs)

    each, together = with_engine(body), with_engine(body, coalesce_passes=True)
    assert together[:3] == (each[0], pytest.approx(each[1]), pytest.approx(each[2]))
    assert (each[3], together[3]) == (50, 2)


def test_load_is_what_the_scheduler_holds() -> None:

    async def body(sim: SimEngine) -> None:
        assert sim.load() == Load(request_total_slots=2, kv_total_blocks=250)
        tasks = [asyncio.create_task(collect(sim, request([n] * 10, 12))) for n in range(3)]
        # The first pass takes 20 ms, the decode passes 10 ms each.
        await asyncio.sleep(0.025)
        load = sim.load()
        assert (load.request_active_slots, load.num_requests_waiting, load.remaining_tokens) == (2, 1, 22)
        assert load.kv_active_blocks == 6
        assert load.gpu_cache_usage_perc == 6 / 250
        assert load.itl_ms is None
        await asyncio.sleep(0.01)
        assert sim.load().itl_ms == pytest.approx(10)
        await asyncio.gather(*tasks)
        assert sim.load().request_active_slots == 0

    with_engine(body, max_num_seqs=2)


def test_load_changed_returns_when_something_happens_and_not_before() -> None:

    async def body(sim: SimEngine) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await sim.load_changed()
        task = asyncio.create_task(collect(sim, request([1])))
        async with asyncio.timeout(0.001):
            await sim.load_changed()
        assert sim.load().request_active_slots == 1
        await task

    with_engine(body)


def test_the_prefix_hit_rate_is_the_cached_share_of_a_prompt() -> None:

    async def body(sim: SimEngine) -> None:
        prompt = list(range(8))
        assert sim.prefix_hit_rate(prompt) == 0.0
        assert sim.prefix_hit_rate([]) == 0.0
        outputs = await collect(sim, request(prompt, 9))
        assert sim.prefix_hit_rate([*prompt, 1, 2]) == pytest.approx(0.8)
        assert sim.prefix_hit_rate([9, *prompt]) == 0.0
        talk = [*prompt, *tokens_of(outputs), 7]
        assert sim.prefix_hit_rate(talk) == pytest.approx(16 / 18)
        assert (await collect(sim, request(talk)))[0].num_cached_tokens == 16

    with_engine(body)


def test_closing_the_iterator_aborts_the_request() -> None:

    async def body(sim: SimEngine) -> None:
        stream = sim.generate(request([1] * 40, 200))
        await anext(stream)
        assert sim.load().kv_active_blocks > 0
        await stream.aclose()
        assert sim.load().kv_active_blocks == 0
        waiting = asyncio.create_task(collect(sim, request([2] * 40, 200)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert sim.load().request_active_slots == 0

    with_engine(body)


def test_closing_the_engine_ends_what_runs_as_aborted() -> None:

    async def main() -> None:
        sim = engine()
        with pytest.raises(EngineError, match="not been started"):
            _ = sim.info
        with pytest.raises(EngineError, match="does not run"):
            await collect(sim, request([1]))
        await sim.start()
        task = asyncio.create_task(collect(sim, request([1], 500)))
        await asyncio.sleep(0.1)
        await sim.close()
        outputs = await task
        assert outputs[-1].finish_reason == "abort"
        assert tokens_of(outputs) == expected_tokens([1], len(tokens_of(outputs)))
        with pytest.raises(EngineError, match="does not run"):
            await collect(sim, request([1]))
        assert sim.load() == Load()
        assert sim.prefix_hit_rate([1] * 8) == 0.0
        await sim.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("bad", "param", "message"),
    [
        (request([]), "prompt", "empty"),
        (request([1] * 1000), "prompt", "1000 tokens; this model takes 1000"),
        (request([1], 0), "max_tokens", "1 or more"),
        (request([-1]), "prompt", "no token id"),
    ],
)
def test_a_wrong_request_is_refused_naming_the_parameter(bad: EngineRequest, param: str, message: str) -> None:

    async def body(sim: SimEngine) -> None:
        with pytest.raises(InvalidRequest, match=message) as caught:
            await collect(sim, bad)
        assert caught.value.details["param"] == param
        assert sim.load().num_requests_waiting == 0

    with_engine(body)


def test_output_is_cut_at_the_models_length() -> None:

    async def body(sim: SimEngine) -> None:
        outputs = await collect(sim, request([1] * 990, 500))
        assert (len(tokens_of(outputs)), outputs[-1].finish_reason) == (10, "length")

    with_engine(body)


def test_the_start_takes_its_time_at_the_speed_asked_for() -> None:

    async def main() -> float:
        sim = engine(start_up_s=30, speed=10)
        await sim.start()
        await sim.close()
        return AsyncioClock().now_s()

    assert run_virtual(main()) == pytest.approx(3)


def test_the_default_is_the_h200_profile_at_speed_1_and_says_so() -> None:

    async def main() -> Any:
        sim = make_engine("sim")
        await sim.start()
        info = sim.info
        outputs = await collect(sim, request(list(range(1117)), 1))
        await sim.close()
        return info, AsyncioClock().now_s(), outputs[-1].finish_reason

    # A loopback side channel is opened, but nobody waits for it: virtual time is right here.
    info, took_s, reason = run_virtual(main())
    assert (info.engine, info.block_size, info.num_gpu_blocks, info.max_model_len) == ("sim", 64, 14_766, 131_072)
    assert info.options["profile"] == "dynamo_H200_TP1P_TP1D"
    assert (info.options["speed"], info.options["start_up_s"]) == (1.0, 0.0)
    assert took_s * 1000 == pytest.approx(38.494, abs=0.01)
    assert reason == "length"


def test_engines_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="no engine 'tgi'; the engines are: sim"):
        make_engine("tgi")
    with pytest.raises(ConfigError, match="no engine profile"):
        run_virtual(SimEngine(SimOptions(profile="nowhere"), transport=InMemoryTransport()).start())
    with pytest.raises(ConfigError, match="max_model_len 2000 does not fit the KV cache of 1000 tokens"):
        run_virtual(engine(max_model_len=2000).start())


async def test_requests_of_one_turn_of_the_loop_share_a_pass() -> None:
    sim = engine()
    await sim.start()
    await asyncio.gather(*(collect(sim, request([n, 1], 1)) for n in range(8)))
    assert sim.passes == 1
    await sim.close()


@pytest.mark.timing
async def test_a_loop_that_was_busy_catches_up_without_drift() -> None:
    sim = engine()
    await sim.start()
    started_s = asyncio.get_running_loop().time()
    task = asyncio.create_task(collect(sim, request([1] * 10, 30)))
    await asyncio.sleep(0.05)
    time.sleep(0.1)
    outputs = await task
    took_s = asyncio.get_running_loop().time() - started_s
    await sim.close()
    assert tokens_of(outputs) == expected_tokens([1] * 10, 30)
    assert max(len(output.token_ids) for output in outputs) >= 8
    assert 0.299 < took_s < 0.36
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[1], [1, 2]])
def test_a_failure_inside_reaches_every_stream(prompt: list[int]) -> None:
    """A bug in the model is an `EngineDead` at once, not a stream that never ends; in the first pass or later."""

    class Broken(FixedModel):
        def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
            raise ArithmeticError("boom")

    async def main() -> None:
        sim = SimEngine(SimOptions(), transport=InMemoryTransport(), perf_model=Broken())
        await sim.start()
        with pytest.raises(EngineDead, match="ArithmeticError: boom"):
            await collect(sim, request(prompt, 5))
        with pytest.raises(EngineDead, match="ArithmeticError: boom"):
            await sim.wait_failed()
        await sim.close()

    run_virtual(main())


def test_an_engine_can_be_made_to_die_at_a_certain_request() -> None:

    async def main() -> None:
        sim = SimEngine(SimOptions(fail_after_requests=2), transport=InMemoryTransport(), perf_model=FixedModel())
        await sim.start()
        watch = asyncio.create_task(sim.wait_failed())
        first = asyncio.create_task(collect(sim, request([1], 500)))
        await asyncio.sleep(0.1)
        assert not watch.done()
        for task in (asyncio.create_task(collect(sim, request([2], 5))), first, watch):
            with pytest.raises(EngineDead, match="fail_after_requests"):
                await task
        with pytest.raises(EngineDead):
            await collect(sim, request([3]))
        await sim.close()

    run_virtual(main())


def test_an_engine_that_is_closed_has_not_failed() -> None:

    async def main() -> None:
        sim = engine()
        await sim.start()
        watch = asyncio.create_task(sim.wait_failed())
        await asyncio.sleep(0)
        await sim.close()
        await watch

    run_virtual(main())
