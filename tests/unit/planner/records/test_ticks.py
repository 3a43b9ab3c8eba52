"""A log of ticks decides once more what was decided, tick for tick."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.cli.main import cli
from dynamo_local.config.planner import POLICIES, PlannerConfig
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Load, Missing
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import BadInput
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.policies.slo import forecast as lengths
from dynamo_local.planner.policies.slo.hindsight import JUDGED_MIN
from dynamo_local.planner.records import ticks
from dynamo_local.planner.records.ticks import Replay, packed, unpacked
from dynamo_local.planner.values import Capabilities, Decision, EngineSeen, Observation, Reading, Traffic
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.simulation import Simulation
from dynamo_local.simulator.trace import TraceRequest
from dynamo_local.system.json_lines import Record, Skipped
from dynamo_local.transport.fpm import decode_pass, encode_pass
from tests.fakes.planner.observations import DECODE, PREFILL, pool, worker_pools
from tests.fakes.planner.options import load_options, sla_options, slo_options, throughput_load_options
from tests.tools.answers import read_answer

OPTIONS = [
    load_options(
        adjustment_interval=4.0,
        max_gpu_budget=6,
        decode_kv_scale_up_threshold=0.03,
        decode_kv_scale_down_threshold=0.01,
    ),
    sla_options(ttft_ms=400.0, itl_ms=12.0, throughput_adjustment_interval_seconds=10.0, max_gpu_budget=6),
    throughput_load_options(
        optimization_target="sla",
        enable_load_scaling=True,
        load_predictor="kalman",
        profile_results_dir=DEFAULT_PROFILE,
        throughput_adjustment_interval_seconds=20.0,
        load_adjustment_interval_seconds=5.0,
        ttft_ms=400.0,
        itl_ms=12.0,
        max_gpu_budget=6,
    ),
    slo_options(ttft_ms=2000.0, itl_ms=50.0, max_gpu_budget=6),
]
GOLDEN = Path(__file__).parents[3] / "golden" / "ticks"
BURST = [TraceRequest(n / 40, 3000, 100) for n in range(2400)]
SIM = SimOptions(num_gpu_blocks=6000)


class Recorded:
    """A `Recorder` that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def began(self, options: PlannerConfig, at_s: float) -> None:
        self.records.append(ticks.options_record(ticks.BEGAN, options, at_s))

    def changed(self, options: PlannerConfig, at_s: float) -> None:
        self.records.append(ticks.options_record(ticks.CHANGED, options, at_s))

    def manual(self, at_s: float) -> None:
        self.records.append(ticks.manual_record(at_s))

    def ticked(self, observation: Observation, decision: Decision | None) -> None:
        self.records.append(ticks.tick_record(observation, decision))


def of_the_twin(options: PlannerConfig, recorded: ticks.Recorded | None = None) -> list[dict[str, Any]]:
    recorder = Recorded()
    policy = policy_of(options, recorded=recorded or ())
    driver = PolicyDriver(policy, 0.0, forecaster=InlineForecaster(), recorder=recorder)
    Simulation(SimulationOptions(shape=FleetShape(1, 1), sim=SIM, gpus=8), BURST, planner=driver).run()
    return recorder.records


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    ticks.TickLog(path).append(records)
    return path


def numbered(records: list[dict[str, Any]]) -> list[Record]:
    return [{"seq": n, **record} for n, record in enumerate(records, 1)]


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `slo` asks the queueing twin is of fewer requests here: it takes a tenth of the time."""
    monkeypatch.setattr(lengths, "REQUESTS", 80)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.policy)
def test_a_log_of_the_twin_decides_the_same_tick_for_tick(options: PlannerConfig, tmp_path: Path) -> None:
    log = written(tmp_path / "ticks.jsonl", of_the_twin(options))
    again = Replay()
    found = list(again.run(ticks.oldest_first(log)))
    assert len(found) >= 2
    assert any(one.then is not None and any(one.then.steps.values()) for one in found)
    assert [one.now for one in found] == [one.then for one in found]
    assert (again.whole, again.without, again.policies) == (True, 0, [options.policy])


@pytest.mark.full
def test_a_replay_begins_with_the_requests_that_the_log_has_from_before(tmp_path: Path) -> None:
    first = of_the_twin(OPTIONS[3])
    known = ticks.recorded_requests(written(tmp_path / "ticks.jsonl", first), Skipped())
    assert len(known) > JUDGED_MIN
    second = of_the_twin(OPTIONS[3], known)
    assert all(one.agrees for one in Replay().run(numbered([*first, *second])))
    assert not all(one.agrees for one in Replay().run(numbered(second)))


def test_the_log_knows_every_policy() -> None:
    assert {options.policy for options in OPTIONS} == set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_of_the_last_release_is_replayed(policy: str) -> None:
    """Version 2 had names of its own for the options."""
    again = Replay()
    replayed = list(again.run(ticks.oldest_first(GOLDEN / f"v2-{policy}.jsonl")))
    assert again.policies == [policy]
    assert again.whole
    assert replayed
    assert all(one.agrees for one in replayed)


def test_other_options_decide_otherwise() -> None:
    """It is not the log that is told once more."""
    records = of_the_twin(OPTIONS[1])
    other = Replay(OPTIONS[1].model_copy(update={"itl_ms": 30.0, "max_gpu_budget": 2}))
    assert any(not one.agrees for one in other.run(numbered(records)))


def test_changes_and_persons_are_part_of_the_log() -> None:
    recorder = Recorded()
    options = load_options(adjustment_interval=10.0, metric_pulling_interval=1.0, max_gpu_budget=4)
    driver = PolicyDriver(policy_of(options), 0.0, recorder=recorder)

    def pulls(until_s: float, kv: float) -> None:
        while driver.next_at_s <= until_s:
            driver.tick_now(
                Observation(Reading(driver.next_at_s, 0, {"w": Load(gpu_cache_usage_perc=kv)}), worker_pools(1, 1))
            )

    pulls(25.0, 0.95)
    driver.manual(25.5)
    pulls(40.0, 0.95)
    driver.change(policy_of(options.model_copy(update={"adjustment_interval": 5.0, "max_gpu_budget": 2})), 40.5)
    pulls(60.0, 0.95)
    found = list(Replay().run(numbered(recorder.records)))
    assert len(found) >= 5
    assert all(one.agrees for one in found)


def test_a_log_that_lost_its_beginning_is_read_from_the_next_options_on() -> None:
    records = numbered(of_the_twin(OPTIONS[0]))
    goes_on = {"seq": 0, **ticks.options_record(ticks.GOES_ON, OPTIONS[0], float(records[30]["at_s"]))}
    again = Replay()
    found = list(again.run([*records[20:30], goes_on, *records[30:]]))
    assert (again.whole, again.ticks) == (False, len(records) - 30)
    assert found


def test_a_pull_is_the_same_after_it_was_written_and_read() -> None:
    engine = EngineId("18446744073709551615", 3)
    seen = ForwardPass(engine, 7, 0.1 + 0.2, Requests(1, 200, 1 / 3, 4, 5, 60, 0.5), Requests(), at_s=1e9 / 7)
    observation = Observation(
        Reading(
            12.3,
            Missing("nats timeout"),
            {"a": Load(gpu_cache_usage_perc=1 / 3, num_requests_waiting=2), "b": Missing("x")},
        ),
        worker_pools(pool(PREFILL, 2, added_at_s=3.0), pool(DECODE, 1, coming=1, waiting=1)),
        Traffic(12.3, 10.0, 0.0, isl=Missing("no request")),
        {engine: EngineSeen(DECODE, (seen,), seen), EngineId("2"): EngineSeen(PREFILL)},
        {DECODE: Capabilities(8192, None, 100)},
        None,
    )
    record = json.loads(json.dumps({"seq": 1, **ticks.tick_record(observation, None)}))
    assert ticks.tick_in(record) == (observation, None)
    measured = {PREFILL: Capabilities(benchmark=Missing("it has none")), DECODE: Capabilities(benchmark=(seen, seen))}
    for other in (
        replace(observation, traffic=Missing("away"), blind="etcd is away"),
        replace(observation, traffic=None),
        replace(observation, capabilities=measured),
    ):
        assert ticks.tick_in({"seq": 1, **ticks.tick_record(other, None)}) == (other, None)


def test_what_is_no_tick_of_ours_is_refused_by_its_number(tmp_path: Path) -> None:
    for version in (1, ticks.VERSION + 1):
        other = written(tmp_path / f"{version}.jsonl", [{"version": version, "kind": "tick", "at_s": 0.0}])
        with pytest.raises(BadInput, match=f"record 1 has version {version}"):
            list(ticks.oldest_first(other))
    began = ticks.options_record(ticks.BEGAN, OPTIONS[0], 0.0)
    tick = ticks.tick_record(Observation(Reading(1.0, 0, {}), worker_pools(1, 1)), None)
    for spoilt in ({"pull": "AAAA"}, {"pull": 3}, {"passes": "AAAA"}, {"passes": None}, {"decided": 7}):
        spoilt = {**tick, **spoilt}
        with pytest.raises(BadInput, match="record 2 of the log of ticks cannot be read"):
            list(Replay().run(numbered([began, {"kind": "tick", "at_s": 1.0, **spoilt}])))
    with pytest.raises(BadInput, match="not known here"):
        list(Replay().run(numbered([{"kind": "other", "at_s": 1.0}])))


def test_the_log_is_bounded(tmp_path: Path) -> None:
    log = ticks.TickLog(tmp_path / "ticks.jsonl", max_bytes=20_000, kept=2)
    for record in of_the_twin(OPTIONS[2]) * 3:
        log.append([record])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size <= 25_000 for file in files)


def test_the_last_hour_of_64_busy_engines_is_in_the_log() -> None:
    """At each tick of five seconds 64 passes of each, as an arbiter reads them. A full file goes, three are left."""
    chance = random.Random(1)
    engines = {}
    for number in range(64):
        engine, at_s = EngineId(str(chance.getrandbits(63))), 5e4
        passes = []
        for count in range(64):
            wall_s = chance.gauss(0.03, 0.003)
            at_s += max(0.0781, wall_s)
            if number % 4:
                running = 60 + chance.randrange(-9, 9)
                scheduled = Requests(
                    0, 0, 0.0, 0, running, running * 3000 + chance.randrange(9000), chance.random() * 1e7
                )
                queued = Requests(0, 0, 0.0, 0, chance.randrange(4), chance.randrange(9000), chance.random() * 1e7)
            else:
                scheduled = Requests(1, chance.randrange(8192), 0.0, 16 * chance.randrange(99), 0, 0, 0.0)
                queued = Requests(chance.randrange(9), chance.randrange(30_000), chance.random() * 1e7)
            read = decode_pass(
                encode_pass(ForwardPass(engine, 10**6 + 3 * count, wall_s, scheduled, queued)),
                round(at_s, 4),
                exact=False,
            )
            assert read is not None
            passes.append(read)
        engines[engine] = EngineSeen(DECODE if number % 4 else PREFILL, tuple(passes), passes[-1])
    observation = Observation(Reading(5e4, 0, {}), worker_pools(16, 48), engines=engines)
    record = ticks.tick_record(observation, None)
    assert ticks.tick_in({"seq": 1, **record}) == (observation, None)
    assert len(json.dumps(record)) * 3600 / 5 <= 3 * ticks.MAX_BYTES


def test_the_command_tells_what_differs(tmp_path: Path) -> None:
    log = written(tmp_path / "ticks.jsonl", of_the_twin(OPTIONS[1]))

    def ask(*words: str) -> Any:
        done = CliRunner().invoke(cli, ["planner", "replay", str(log), *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        if "--json" in words:
            read_answer(["planner", "replay"], done.output)
        return done.output

    same = json.loads(ask("--json"))
    assert (same["differ"], same["whole"], same["policies"]) == (0, True, ["sla"])
    assert same["decisions"] >= 3
    assert "0 other" in ask()
    profile = f"profile-results-dir={DEFAULT_PROFILE}"
    settings = (profile, "itl=12", "ttft=400", "adjustment-interval=10", "max-gpu-budget=2")
    other = ask("--policy", "sla", *(word for setting in settings for word in ("--set", setting)))
    assert "; now PrefillWorker 1" in other
    load = json.loads(ask("--policy", "load", "--json"))
    assert load["policies"] == ["load"]
    assert load["differ"] > 0


# --- columns
# Columns come back as they were, and small ones are small.

WHOLE = st.integers(-(2**53), 2**53)
MEASURED = st.integers(-(10**12), 10**12).map(lambda n: n / 10**6)
ANY = st.floats(allow_nan=False)


@given(st.integers(0, 30).flatmap(lambda count: st.lists(_columns(count), max_size=4)))
def test_columns_come_back_as_they_were(columns: list[list[float]]) -> None:
    found = unpacked(packed(columns))
    assert found == columns
    assert [[type(value) for value in column] for column in found] == [[type(v) for v in column] for column in columns]


def _columns(count: int) -> st.SearchStrategy[list[float]]:
    def of(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
        return st.lists(values, min_size=count, max_size=count)

    return st.one_of(of(WHOLE), of(MEASURED), of(ANY))


@pytest.mark.parametrize(
    ("column", "most"),
    [
        ([0] * 4096, 100),
        (list(range(10**9, 10**9 + 4096)), 100),
        ([round(1_000_000.0 + n / 50, 4) for n in range(4096)], 100),
        ([n * 7919 % 251 for n in range(4096)], 4096 * 1.1),
        ([round(0.01 + (n * 7919 % 251) / 10**6, 6) for n in range(4096)], 4096 * 2.1),
    ],
    ids=["zeros", "numbers of passes", "times", "counts", "durations"],
)
def test_what_is_alike_takes_no_room(column: list[float], most: float) -> None:
    assert len(packed([column])) <= most


def test_what_is_no_column_is_refused() -> None:
    good = packed([[1, 2, 300], [0.5, 1 / 3, 7.0]])
    for spoilt in (good[:-1], good[:-20], good + b"\x00", b"\x04" + good[1:], b""):
        with pytest.raises((ValueError, zlib.error)):
            unpacked(spoilt)
