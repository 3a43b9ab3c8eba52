"""A measurement from its request to its points, on simulated engines whose truth is a profile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.components.measurement import Measurable, MeasureRequest
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import DeadlineExceeded, InvalidRequest
from dynamo_local.measuring.graph import MeasuredGraph, Worker
from dynamo_local.measuring.profile import Session, spending
from dynamo_local.profile.document import resumed
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.points import Kind, Limits, Point, sweep
from dynamo_local.profile.repetitions import Progress, Rules, measured, noticed
from tests.fakes.measured_graph import InProcessGraph, in_process

SPEED = 200.0
MIXED_SPEED = 4.0
ALONE = (Kind.PREFILL, Kind.CACHED, Kind.DECODE)
LIMITS = Limits(max_kv_tokens=60_000, context_length=4096, max_num_seqs=64)
TRUTH = ProfileModel.load(SimOptions().profile)


def truth_ms(point: Point, kv_tokens: float) -> float:
    if point.kind is Kind.DECODE:
        return TRUTH.itl_s(round(kv_tokens), kv_tokens / point.requests) * 1000 / SPEED
    if point.kind is Kind.MIXED:
        prompt_s = TRUTH.launch_s + TRUTH.prefill_s(0, point.chunk)
        return (prompt_s + TRUTH.itl_s(round(kv_tokens), kv_tokens / point.requests)) * 1000 / SPEED
    cached = round(kv_tokens)
    return (TRUTH.launch_s + TRUTH.prefill_s(cached, point.tokens - cached)) * 1000 / SPEED


def session(graph: InProcessGraph, folder: Path, tell=lambda progress, point: None) -> Session:
    """Over all kinds of points."""
    return Session(graph, {kind: graph.workers for kind in Kind}, {kind: LIMITS for kind in Kind}, folder, "hash", tell)  # type: ignore[arg-type]  # the fake has what is needed of a graph


async def test_every_point_is_within_three_per_cent_of_what_the_engine_plays(tmp_path):
    """Prompts, prompts with a cached half, and loads: at the engine, whatever else this machine does meanwhile."""
    points = tuple(sweep(LIMITS, ALONE, (5, 3)))
    async with in_process(w=SPEED) as graph:
        progress = await session(graph, tmp_path).run(Progress(points, Rules(budget_s=60.0)))
    known = measured(progress)
    assert set(known) == set(points)
    for point, each in known.items():
        kv_tokens = sum(sample.kv_tokens for sample in each.samples) / len(each.samples)
        assert each.interval.mean == pytest.approx(truth_ms(point, kv_tokens), rel=0.03), str(point)
        assert each.interval.relative <= 0.03
        if point.kind is Kind.CACHED:
            assert 0 < kv_tokens <= point.cached
        if point.kind is Kind.DECODE:
            assert kv_tokens / point.requests == pytest.approx(point.tokens, rel=0.25)


async def test_passes_that_prefill_and_decode_at_once_are_the_sum_that_this_engine_plays(tmp_path):
    points = tuple(sweep(LIMITS, (Kind.MIXED,), (5, 3)))
    async with in_process(w=MIXED_SPEED) as graph:
        progress = await session(graph, tmp_path).run(Progress(points, Rules(budget_s=60.0)))
    known = measured(progress)
    assert set(known) == set(points)
    assert {point.chunk for point in points} == {511, 4095}
    for point, each in known.items():
        kv_tokens = sum(sample.kv_tokens for sample in each.samples) / len(each.samples)
        assert each.interval.mean * MIXED_SPEED / SPEED == pytest.approx(truth_ms(point, kv_tokens), rel=0.03)


async def test_a_slow_worker_among_equals_is_noticed(tmp_path):
    points = tuple(sweep(LIMITS, (Kind.PREFILL, Kind.DECODE), (3, 2)))
    async with in_process(a=SPEED, b=SPEED / 1.2, c=SPEED) as graph:
        progress = await session(graph, tmp_path).run(Progress(points, Rules(budget_s=20.0)))
    [found] = noticed(measured(progress))
    assert (found.kind, found.worker) == ("slow_worker", "b")


async def test_an_engine_that_drifts_while_it_is_measured_is_noticed(tmp_path):
    """Its passes take a fifth longer at the end than at the beginning, a little more with each repetition."""
    points = tuple(sweep(LIMITS, (Kind.PREFILL, Kind.DECODE), (5, 3)))
    repetitions = 3 * len(points)
    graphs: list[InProcessGraph] = []
    async with in_process(lambda: 1 + 0.25 * min(1.0, graphs[0].asked / repetitions), w=SPEED) as graph:
        graphs.append(graph)
        progress = await session(graph, tmp_path).run(Progress(points, Rules(budget_s=20.0, width=0.2)))
    [found] = noticed(measured(progress))
    assert found.kind == "drift"
    assert 0.1 < found.size < 0.4


@pytest.mark.full
async def test_a_noisy_neighbour_of_the_engine_is_noticed(tmp_path):
    points = tuple(sweep(LIMITS, (Kind.PREFILL, Kind.DECODE), (5, 3)))
    graphs: list[InProcessGraph] = []
    async with in_process(lambda: 1.5 if graphs[0].asked % 5 == 0 else 1.0, w=SPEED) as graph:
        graphs.append(graph)
        progress = await session(graph, tmp_path).run(Progress(points, Rules(budget_s=20.0, repeats_min=6)))
    [found] = noticed(measured(progress))
    assert found.kind == "noisy_neighbour"
    assert found.size == pytest.approx(0.5, abs=0.1)


async def test_a_measurement_that_is_stopped_goes_on_where_it_was(tmp_path):
    """Ctrl-C keeps every repetition, and what is measured then are the others."""
    points = tuple(sweep(LIMITS, (Kind.PREFILL,), (5, 3)))
    async with in_process(w=SPEED) as graph:

        def stop(progress: Progress, point: Point | None) -> None:
            if len(measured(progress)) == 3:
                first.stop.set()

        first = session(graph, tmp_path, tell=stop)
        left = await first.run(Progress(points, Rules(budget_s=60.0)))
        before = graph.asked
        again = resumed(tmp_path, Rules(budget_s=60.0), "hash")
        assert measured(again) == measured(left)
        assert set(again.points) == set(points)
        done = await session(graph, tmp_path).run(again)
        repetitions = sum(len(each.samples) for each in measured(done).values())
        assert set(measured(done)) == set(points)
        assert graph.asked - before < repetitions + 5  # warming up; nothing was repeated for nothing
    for point, each in measured(left).items():
        assert measured(done)[point].samples[: len(each.samples)] == each.samples


async def test_what_the_engine_refuses_gives_its_point_up_and_nothing_else(tmp_path):
    good, bad = Point(Kind.PREFILL, 300), Point(Kind.PREFILL, 300_000)
    async with in_process(w=SPEED) as graph:
        progress = await session(graph, tmp_path).run(Progress((good, bad), Rules(budget_s=30.0)))
    assert list(measured(progress)) == [good]
    assert len(progress.of(bad).failures) == 3


@pytest.mark.timing
async def test_an_engine_that_tells_no_passes_is_timed_from_outside():
    """A server behind a command has no recorder. On a busy machine answers come together: then it is tried again."""
    engine = SimEngine(SimOptions(speed=1.0))
    await engine.start()
    try:
        measurable = Measurable(engine, None)
        answer = await measurable.measure(MeasureRequest(prompts=2, tokens=500, seed=1))
        assert answer["passes"] == []
        assert min(answer["ttft_s"]) >= TRUTH.ttft_s(500)
        decoded = await measurable.measure(MeasureRequest(prompts=2, tokens=100, seed=1, passes=5, answer_max=6))
        assert decoded["itl_s"] >= 0.5 * TRUTH.itl_s(200, 100)
        with pytest.raises(InvalidRequest):
            await measurable.measure(MeasureRequest(prompts=1, tokens=300_000, seed=1))
        with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            await measurable.measure(MeasureRequest(prompts=1, tokens=100_000, seed=1, timeout_s=0.01))
    finally:
        await engine.close()


# --- session
# The order in which workers are measured.

WORKERS = [Worker(f"profile_VllmWorker_{number}", "VllmWorker", number, ()) for number in range(2)]


class Graph:
    """Answers after a turn of the loop, and counts who is measured at once."""

    def __init__(self) -> None:
        self.at_once = 0
        self.most = 0

    async def measure(self, worker: Worker, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        count = request["prompts"]
        return {"passes": [(0.01, 0, 0, request["tokens"], 0)] * count, "ttft_s": [0.01] * count, "itl_s": None}


@pytest.mark.parametrize(("in_turn", "most"), [(False, 2), (True, 1)])
async def test_engines_that_share_processors_are_measured_one_after_the_other(
    in_turn: bool, most: int, tmp_path: Path
) -> None:
    """Side by side each would be timed with the other as its neighbour; engines with GPUs of their own do not mind."""
    graph, point = Graph(), Point(Kind.PREFILL, 100)
    limits = {Kind.PREFILL: Limits(9600, 4096, 16)}
    session = Session(
        cast(MeasuredGraph, graph),
        {Kind.PREFILL: WORKERS},
        limits,
        tmp_path,
        "hash",
        lambda *_: None,
        in_turn=in_turn,
    )
    progress = await session.run(Progress((point,), Rules(budget_s=60.0)))
    samples = progress.of(point).samples
    assert {sample.worker for sample in samples} == {worker.name for worker in WORKERS}
    assert {sample.value_ms for sample in samples} == {10.0}
    assert graph.most == most


# --- spending
# The budget is for all that a measurement does: what a slow start takes, the rest must do without.


def test_a_quarter_of_an_hour_is_not_exceeded_by_engines_that_take_long_to_start():
    """vLLM on a busy host: 100 s to start, and as long again for each role's one more worker. It was five minutes over
    its budget."""
    spent = spending(900.0, 100.0, [100.0, 90.0])
    assert spent.points_s + spent.trace_s + spent.actions_s == pytest.approx(800.0)
    assert spent.actions_s == 220.0
    assert spent.trace_s == pytest.approx(580.0 / 3)


def test_without_actions_two_thirds_are_for_the_points():
    assert spending(240.0, 0.0, ()).points_s == pytest.approx(160.0)
    assert spending(3600.0, 0.0, ()).trace_s == 300.0


@pytest.mark.parametrize("started_s", [16.0, 30.0, 500.0])
def test_a_start_longer_than_half_of_the_budget_leaves_the_other_half(started_s: float) -> None:
    spent = spending(30.0, started_s, [500.0])
    assert spent.points_s + spent.trace_s + spent.actions_s == pytest.approx(max(15.0, 30.0 - started_s))
    assert spent.points_s > spent.trace_s > 0.0
    assert spent.actions_s <= 5.0 + 1e-9
