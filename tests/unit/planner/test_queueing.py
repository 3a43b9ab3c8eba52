"""The queueing model computes nothing twice. Its shares equal those of the plain model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynamo_local.planner.queueing import (
    Demand,
    Engine,
    EngineOptions,
    Evaluator,
    Past,
    Run,
    Streams,
    done_at,
    misses,
)
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.metrics import measure
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner import plain_queueing as plain

TTFT_S, ITL_S = 0.3, 0.008
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


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "aggregated"])
def test_an_answer_of_one_token_has_no_gap(mixed: bool) -> None:
    demand = replace(requests(0), osl=(1,) * 240)
    engine = Engine(PASSES, EngineOptions(mixed=mixed))
    streams = Streams.of(demand, demand.times(20.0))
    assert Run(streams, 4, engine, 1e-9, 5.0 if mixed else None).share() == 1.0


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

    def decode(workers: int) -> float:
        return plain.steady_share(demand, streams, workers, slowly, ITL_S, engine)

    assert found.decode == plain.monotone(decode, most)
    assert sum(0 < share < found.decode[-1] for share in found.decode) > 0  # there was something to compute


@pytest.mark.parametrize("use", USES)
def test_a_run_that_was_left_off_goes_on_to_the_same_share(use: str) -> None:
    engine, demand = Engine(PASSES, replace(USES[use], max_num_seqs=30)), requests(7)
    times = demand.times(60.0)
    for workers in range(1, 12):
        streams = Streams.of(demand, times, steady=True)
        run, whole = Run(streams, workers, engine, ITL_S), Run(streams, workers, engine, ITL_S).share()
        for least in (1.0, 0.9, 0.5, 0.1):
            assert run.share(least) == (whole if whole >= least else -1.0)
        assert run.share() == whole


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "aggregated"])
@pytest.mark.parametrize(
    ("isl", "osl", "rate"),
    [
        (500, 3000, 8.0),
        pytest.param(2000, 1000, 16.0, marks=pytest.mark.full),
        pytest.param(3000, 150, 40.0, marks=pytest.mark.full),
    ],
)
def test_a_few_requests_tell_what_many_would_although_an_answer_takes_longer_than_they_do(
    isl: int, osl: int, rate: float, mixed: bool
) -> None:
    engine = Engine(PASSES, EngineOptions(mixed=mixed))
    rng = random.Random(osl)
    rows = [(rng.expovariate(1.0), isl * rng.uniform(0.4, 1.6), osl * rng.uniform(0.4, 1.6)) for _ in range(400)]
    gaps, prompts, answers = zip(*rows, strict=True)
    few = Demand(gaps, tuple(map(int, prompts)), tuple(map(int, answers)))
    many = Demand(few.gaps * 20, few.isl * 20, few.osl * 20)
    shares = [Evaluator(engine, 2.0, ITL_S).shares(each, 1, rate, 16).decode for each in (few, many)]
    assert 1 < fewest(shares[1]) < 16
    assert abs(fewest(shares[0]) - fewest(shares[1])) <= 1


def fewest(shares: Sequence[float]) -> int:
    """The fewest workers that keep nine of ten."""
    return next((workers for workers, share in enumerate(shares) if share >= 0.9), len(shares))


def test_streams_that_run_at_the_beginning_are_as_many_as_littles_law_says() -> None:
    engine = Engine(PASSES, EngineOptions())
    came = tuple((second / 5, 1000, 400) for second in range(101))  # five in a second, for twenty seconds
    running = list(Streams(came, 0, steady=True).running(2, engine, slower=1.0))
    gap_s = engine.itl_s(len(running) / 2 * 1200, 1200)
    assert len(running) == pytest.approx(5 * 400 * gap_s, rel=0.03)
    assert sum(left for _, _, left in running) / len(running) == pytest.approx(200, rel=0.1)
    assert list(Streams(came, 0).running(2, engine, slower=1.0)) == []
    burst = Streams(tuple((at_s / 1e6, isl, tokens) for at_s, isl, tokens in came), 0, steady=True)
    assert len(list(burst.running(2, engine, slower=1.0))) == 2 * engine.options.max_num_seqs


def past(seed: int, rate: float, fills_s: float = 20.0) -> Past:
    demand = requests(seed, 600)
    return Past(tuple(demand.times(rate)), demand.isl, demand.osl, fills_s, 5.0, 16)


@pytest.mark.parametrize("seed", range(3))
def test_the_past_counts_whom_each_number_of_workers_would_have_made_late(seed: int) -> None:
    engine, came = Engine(PASSES, EngineOptions()), past(seed, 6.0)
    found = misses(came, 8, engine, TTFT_S, ITL_S)
    allowed_s = TTFT_S - min(ITL_S, engine.itl_s(engine.max_kv_tokens / 8, 2048))
    for workers in (1, 2, 8):
        done = done_at(list(came.times), came.isl, workers, engine)
        late = [0] * came.bins
        for at_s, done_s in zip(came.times, done, strict=True):
            if done_s - at_s > allowed_s and 0 <= came.bin(at_s) < came.bins:
                late[came.bin(at_s)] += 1
        assert sum(found.prefill[workers]) == pytest.approx(sum(late), abs=1), "as good as the largest fleet is enough"
    assert found.prefill[0] == found.decode[0] == found.requests, "nobody serves"
    assert sum(found.requests) == sum(0 <= came.bin(at_s) < came.bins for at_s in came.times)


def test_requests_that_fill_the_workers_are_not_judged_but_are_in_the_way() -> None:
    engine = Engine(PASSES, EngineOptions())
    times, few = tuple(n * 0.01 for n in range(400)), EngineOptions(max_num_seqs=4)
    crowded = Past(times, (200,) * 400, (300,) * 400, 3.5, 5.0, 1)
    alone = Past(times[350:], (200,) * 50, (300,) * 50, 3.5, 5.0, 1)
    assert sum(misses(crowded, 4, engine, 9.0, 9.0).requests) == sum(misses(alone, 4, engine, 9.0, 9.0).requests) == 50
    slow = Engine(PASSES, few)
    assert sum(misses(crowded, 4, slow, 9.0, 9.0).decode[4]) >= sum(misses(alone, 4, slow, 9.0, 9.0).decode[4])


def test_an_empty_past_misses_nothing() -> None:
    found = misses(Past((), (), (), 0.0, 5.0, 3), 4, Engine(PASSES, EngineOptions()), TTFT_S, ITL_S)
    assert found.requests == found.prefill[0] == found.decode[4] == (0, 0, 0)


# --- aggregated workers


@pytest.mark.parametrize(("workers", "seed"), [(2, 0), (4, 1), (8, 2)])
def test_aggregated_shares_are_near_those_of_the_simulator(workers: int, seed: int) -> None:
    demand, rate, ttft_ms, itl_ms = requests(seed, 600), 7.0 * workers, 300.0, 15.0
    engine = Engine(PASSES, EngineOptions(mixed=True))
    shares = Evaluator(engine, ttft_ms / 1000, itl_ms / 1000).shares(demand, 1, rate, 8)
    assert set(shares.prefill) == {1.0}
    rows = [TraceRequest(*each) for each in zip(demand.times(rate), demand.isl, demand.osl, strict=True)]
    options = SimulationOptions(shape=FleetShape(0, workers), gpus=workers)
    simulated = measure(run_case(rows, Case("", options)), Slo(ttft_ms, itl_ms))
    assert shares.decode[workers] == pytest.approx(simulated.attainment, abs=0.08)


def test_prompts_delay_the_tokens_of_an_aggregated_worker() -> None:
    engine = Engine(PASSES, EngineOptions(mixed=True))
    alone, beside = (Streams(((0.0, 500, 200), *((0.2, 8000, 1),) * n), 0) for n in (0, 6))
    itl_s = 1.2 * engine.itl_s(700, 700)
    assert list(run_of(alone, engine, itl_s).missed) == []
    assert 0 in run_of(beside, engine, itl_s).missed


def run_of(streams: Streams, engine: Engine, itl_s: float) -> Run:
    """One worker with these requests."""
    run = Run(streams, 1, engine, itl_s, ttft_s=10.0)
    run.share()
    return run
