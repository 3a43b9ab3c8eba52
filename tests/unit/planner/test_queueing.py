"""The queueing model computes nothing twice. Its shares equal those of the plain model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dynamo_local.planner.queueing import Demand, Engine, EngineOptions, Evaluator, Run, Streams, decode_share
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.planner import plain_queueing as plain

TTFT_S, ITL_S = 0.3, 0.012
PASSES = passes_of(DEFAULT_PROFILE)
USES = {
    "as it is": EngineOptions(),
    "little KV": EngineOptions(max_kv_tokens=40_000, max_num_seqs=12),
    "slow": EngineOptions(prefill_factor=1.7, decode_factor=1.35),
    "in turn": EngineOptions(turns=True),
}


def requests(seed: int, count: int = 240) -> Demand:
    """Bursts, and lengths of all kinds."""
    rng = random.Random(seed)
    gaps = [round(rng.expovariate(1.0) * rng.choice((0.2, 1.0, 2.5)), 4) for _ in range(count)]
    return Demand(
        tuple(gaps),
        tuple(int(rng.lognormvariate(7.5, 0.9)) + 1 for _ in gaps),
        tuple(int(rng.lognormvariate(4.5, 0.9)) + 1 for _ in gaps),
    )


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("seed", range(3))
def test_all_shares_are_those_of_the_plain_one(use: str, seed: int) -> None:
    options, demand, rate, most = USES[use], requests(seed), 60.0 * (seed + 1), 24
    engine, slowly = Engine(PASSES, options), plain.PlainEngine(PASSES, options)
    found = Evaluator(engine, TTFT_S, ITL_S).shares(demand, 1, rate, most)
    times, took_s = demand.times(rate), [engine.prompt_s(each) for each in demand.isl]
    after_s = min(ITL_S, slowly.itl_s(slowly.max_kv_tokens / 8, 2048))

    def done(workers: int) -> list[float]:
        if not options.turns:
            return plain.done_at(times, took_s, workers)
        done_s = [0.0] * len(times)
        for first in range(min(workers, len(times))):
            done_s[first::workers] = plain.done_at(times[first::workers], took_s[first::workers], 1)
        return done_s

    def prefill(workers: int) -> float:
        waits = zip(times, done(workers), strict=True)
        return sum(done_s - at_s <= TTFT_S - after_s for at_s, done_s in waits) / len(times)

    assert found.prefill == plain.monotone(prefill, most)
    enough = next(n for n, share in enumerate(found.prefill) if share >= found.prefill[-1] - plain.FULL)
    streams = done(enough)
    assert found.decode == plain.monotone(lambda n: plain.decode_share(demand, streams, n, slowly, ITL_S), most)
    assert sum(0 < share < found.decode[-1] for share in found.decode) > 0  # there was something to compute


@pytest.mark.parametrize("use", USES)
def test_a_run_that_was_left_off_goes_on_to_the_same_share(use: str) -> None:
    engine, demand = Engine(PASSES, replace(USES[use], max_num_seqs=30)), requests(7)
    times = demand.times(60.0)
    for workers in range(1, 12):
        whole = decode_share(demand, times, workers, engine, ITL_S)
        run = Run(Streams.of(demand, times), workers, engine, ITL_S)
        for least in (1.0, 0.9, 0.5, 0.1):
            assert run.share(least) == (whole if whole >= least else -1.0)
        assert run.share() == whole
