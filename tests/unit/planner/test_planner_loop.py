"""The planner's loop on a virtual clock: when it pulls and decides, and that nothing ends or doubles it."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.errors import NatsUnavailable
from dynamo_local.planner.collector import Longest, LoopLatency
from dynamo_local.planner.connectors import Refused
from dynamo_local.planner.loop import PlannerState
from dynamo_local.planner.records.decision_log import Outcome
from tests.fakes.planner.planner_loop import DECODE, OPTIONS, PREFILL, Rig, failing, on_virtual_time, taking

FIRST = f"dynamo_{DECODE}_0"


@on_virtual_time
async def test_pulls_and_decisions_fall_on_their_grid() -> None:
    rig = Rig()
    rig.start()
    await rig.until(30.5)
    assert [reading.at_s for reading in rig.readings] == pytest.approx([float(n) for n in range(1, 31)])
    assert rig.decided_at() == pytest.approx([10.0, 20.0, 30.0])
    await rig.loop.stop()


@on_virtual_time
async def test_work_between_pulls_makes_nothing_drift() -> None:
    rig = Rig()
    rig.before_loads, rig.before_depth, rig.before_act = taking(0.2), taking(0.15), taking(0.5)
    rig.kv = 0.95
    rig.start()
    await rig.until(3 * 10 + 0.9)
    assert len(rig.acts) == 3
    assert [reading.at_s for reading in rig.readings] == pytest.approx([float(n) for n in range(1, 31)])
    assert rig.decided_at() == pytest.approx([10.0, 20.0, 30.0])
    await rig.loop.stop()


@on_virtual_time
async def test_ticks_do_not_overlap_and_pulls_that_were_slept_over_are_left_out() -> None:
    rig = Rig()
    rig.before_act, rig.kv = taking(3.5), 0.95
    rig.start()
    await rig.until(25.5)
    at = [round(reading.at_s, 3) for reading in rig.readings]
    assert [second for second in at if 10 <= second < 16] == [10.0, 13.5, 14.0, 15.0]
    assert rig.decided_at()[:2] == pytest.approx([10.0, 20.0])
    await rig.loop.stop()


@on_virtual_time
async def test_a_slow_source_costs_its_own_sample_and_nothing_else() -> None:
    """The queue takes 2.5 s to answer: loads are there every second, the queue's value while it is young enough."""
    rig = Rig()
    rig.before_depth, rig.depth_now = taking(2.5), 4
    rig.start()
    await rig.until(10.9)
    assert [reading.at_s for reading in rig.readings] == pytest.approx([float(n) for n in range(1, 11)])
    assert all(reading.loads == {FIRST: reading.loads[FIRST]} for reading in rig.readings)
    assert not any(isinstance(reading.loads[FIRST], Missing) for reading in rig.readings)
    assert isinstance(rig.readings[0].queue, Missing)
    assert rig.readings[3].queue == 4
    assert len([what for what, _ in rig.asked if what == "depth"]) == 4, "never two questions at once"
    await rig.loop.stop()


@on_virtual_time
async def test_a_source_that_hangs_is_missing_and_is_asked_anew_in_the_end() -> None:
    rig = Rig()
    rig.before_depth = taking(1e6)
    rig.start()
    await rig.until(15.0)
    assert all(isinstance(reading.queue, Missing) for reading in rig.readings)
    assert rig.rules(PREFILL) == ["missing"]
    assert rig.rules(DECODE) == ["within"]
    rig.before_depth = taking(0.0)
    await rig.until(30.5)
    assert rig.readings[-1].queue == 0
    await rig.loop.stop()


@pytest.mark.parametrize("error", [NatsUnavailable("NATS is away"), ZeroDivisionError("a bug")])
def test_a_source_that_fails_is_missing_with_its_reason(error: Exception) -> None:

    @on_virtual_time
    async def run() -> None:
        rig = Rig()
        rig.before_loads = failing(error)
        rig.start()
        await rig.until(10.5)
        load = rig.readings[-1].loads[FIRST]
        assert isinstance(load, Missing)
        assert str(error) in load.reason
        assert rig.readings[-1].queue == 0
        assert rig.rules(DECODE) == ["missing"]
        assert rig.loop.counts.failed_ticks == 0
        await rig.loop.stop()

    run()


@on_virtual_time
async def test_a_load_stands_for_three_pulls_and_is_missing_then() -> None:
    rig = Rig(decode=2)
    rig.start()
    await rig.until(2.5)
    rig.silent = {f"dynamo_{DECODE}_1"}
    await rig.until(7.5)
    known = [not isinstance(reading.loads[f"dynamo_{DECODE}_1"], Missing) for reading in rig.readings]
    assert known == [True, True, True, True, True, False, False]
    assert not any(isinstance(reading.loads[FIRST], Missing) for reading in rig.readings)
    await rig.loop.stop()


@on_virtual_time
async def test_a_failing_tick_is_counted_told_once_and_tried_again() -> None:
    """The predecessor's autoscaling ended with its first exception, in silence."""
    rig = Rig()
    rig.pools_fail = [ValueError("no fleet"), ValueError("no fleet"), ValueError("no fleet")]
    rig.start()
    await rig.until(30.5)
    assert rig.loop.counts.failed_ticks == 3
    assert rig.loop.counts.pulls <= 31, "it does not spin"
    assert [text.split("(")[0] for text in rig.told] == ["planner: a tick failed ", "planner: goes on "]
    assert len(rig.records) == 3
    await rig.loop.stop()


@on_virtual_time
async def test_an_observer_that_fails_costs_nobody_anything() -> None:
    class Broken:
        def on_observation(self, observation: object) -> None:
            raise RuntimeError("no disk")

        def on_decision(self, record: object) -> None:
            raise RuntimeError("no disk")

    rig = Rig()
    rig.loop.observers.insert(0, Broken())
    rig.start()
    await rig.until(20.5)
    assert (len(rig.readings), len(rig.records)) == (20, 2)
    assert rig.loop.counts.failed_ticks == 0
    await rig.loop.stop()


@on_virtual_time
async def test_a_decision_is_carried_out_under_its_own_number() -> None:
    rig = Rig(last_number=7)
    rig.kv = 0.95
    rig.start()
    await rig.until(10.5)
    assert rig.acts == [(DECODE, 1, "planner:8", pytest.approx(10.0))]
    (record,) = rig.records
    assert record.stimulus_id == "planner:8"
    assert record.outcomes[DECODE].outcome is Outcome.COMMITTED
    assert record.inputs.average_kv_load == 0.95
    assert record.inputs.readings == 10
    await rig.loop.stop()


@on_virtual_time
async def test_a_refusal_is_recorded_and_decided_again_at_a_later_tick() -> None:
    rig = Rig()
    rig.kv, rig.outcome = 0.95, Refused("no GPU is free", "not_enough_gpus", retryable=True)
    rig.start()
    await rig.until(20.5)
    assert [record.outcomes[DECODE].code for record in rig.records] == ["not_enough_gpus"] * 2
    assert [at_s for *_, at_s in rig.acts] == pytest.approx([10.0, 20.0])
    assert rig.loop.counts.failed_ticks == 0
    await rig.loop.stop()


@on_virtual_time
async def test_a_bug_in_carrying_out_is_on_record_and_ends_nothing() -> None:
    rig = Rig()
    rig.kv, rig.before_act = 0.95, failing(KeyError("a bug"))
    rig.start()
    await rig.until(20.5)
    assert [record.outcomes[DECODE].outcome for record in rig.records] == [Outcome.REFUSED] * 2
    assert "KeyError" in (rig.records[0].outcomes[DECODE].reason or "")
    assert rig.loop.counts.failed_ticks == 2
    await rig.loop.stop()


@on_virtual_time
async def test_no_operation_decides_and_acts_on_nothing() -> None:
    rig = Rig()
    rig.kv = 0.95
    rig.start(no_operation=True)
    await rig.until(20.5)
    assert rig.acts == []
    assert [record.decision.steps[DECODE] for record in rig.records] == [1, 1]
    assert [record.outcomes[DECODE].outcome for record in rig.records] == [Outcome.NO_OPERATION] * 2
    await rig.loop.stop()


@on_virtual_time
async def test_after_a_persons_change_it_holds_for_an_interval_and_plans_from_what_is() -> None:
    rig = Rig()
    rig.kv = 0.95
    rig.start()
    await rig.until(9.5)
    rig.pools = rig.grown(decode=3)
    rig.loop.on_manual_change()
    await rig.until(19.4)
    assert rig.records == []
    await rig.until(19.6)
    assert rig.records[0].decision.targets[DECODE] == 4
    await rig.loop.stop()


@on_virtual_time
async def test_paused_it_observes_and_decides_nothing_and_resumed_its_interval_begins_anew() -> None:
    rig = Rig()
    rig.kv = 0.95
    rig.start()
    await rig.until(5.5)
    rig.loop.pause()
    await rig.until(30.2)
    assert rig.records == []
    assert len(rig.readings) == 5 + 24
    rig.loop.resume()
    await rig.until(40.1)
    assert rig.records == []
    await rig.until(40.3)
    assert rig.decided_at() == pytest.approx([40.2])
    await rig.loop.stop()


@on_virtual_time
async def test_new_options_wake_a_loop_that_sleeps_for_long() -> None:
    rig = Rig()
    rig.kv = 0.8
    rig.start(OPTIONS.model_copy(update=dict(adjustment_interval=600.0, metric_pulling_interval=300.0)))
    await rig.until(5.0)
    rig.change(OPTIONS.model_copy(update=dict(decode_kv_scale_up_threshold=0.75)))
    await rig.until(10.5)
    assert [(component, step) for component, step, *_ in rig.acts] == [(DECODE, 1)]
    await rig.loop.stop()


@on_virtual_time
async def test_while_etcd_or_nats_is_away_it_holds_says_so_once_and_goes_on() -> None:
    """Also where the interval has samples of before: nothing is done on what cannot be seen now."""
    rig = Rig()
    rig.kv, rig.depth_now = 0.95, 9
    rig.start()
    await rig.until(8.5)
    rig.blindness = "etcd does not answer"
    await rig.until(35.5)
    assert rig.acts == []
    assert rig.rules(DECODE) == ["missing"] * 3
    assert rig.rules(PREFILL) == ["missing"] * 3
    assert rig.told == ["planner: holds: etcd does not answer"]
    assert rig.loop.trouble == "holds: etcd does not answer"
    rig.blindness = None
    await rig.until(40.5)
    assert {component for component, *_ in rig.acts} == {DECODE, PREFILL}
    assert rig.told[1:] == ["planner: goes on (it was: holds: etcd does not answer)"]
    assert rig.loop.trouble is None
    await rig.loop.stop()


@on_virtual_time
async def test_an_up_that_waited_for_a_gpu_is_not_carried_out_while_etcd_is_away() -> None:
    rig = Rig(prefill=2, decode=1)
    rig.kv = 0.95
    rig.start(OPTIONS.model_copy(update=dict(max_gpu_budget=3)))
    await rig.until(10.5)
    assert [(component, step) for component, step, *_ in rig.acts] == [(PREFILL, -1)]
    assert rig.records[0].outcomes[DECODE].outcome is Outcome.DEFERRED
    rig.blindness, rig.pools = "etcd does not answer", rig.grown(prefill=1)
    await rig.until(25.5)
    assert rig.rules(DECODE)[1] == "gpu_freed"
    assert rig.records[1].outcomes[DECODE].code == "blind"
    assert len(rig.acts) == 1
    rig.blindness = None
    await rig.until(45.5)
    assert (DECODE, 1) in {(component, step) for component, step, *_ in rig.acts}
    await rig.loop.stop()


@on_virtual_time
async def test_a_source_that_fails_for_long_is_told_of_once() -> None:
    """`dynamo status` says what is not known, in words that do not change with every pull."""
    rig = Rig()
    rig.start()
    await rig.until(5.5)
    rig.before_depth = failing(NatsUnavailable("NATS is away"))
    await rig.until(25.5)
    assert rig.told == ["planner: holds: the depth of the prefill queue is not known"]
    rig.before_depth = taking(0.0)
    await rig.until(27.5)
    assert len(rig.told) == 2
    await rig.loop.stop()


@on_virtual_time
async def test_a_loop_that_fails_is_stopped_at_once() -> None:
    rig = Rig()
    rig.start(OPTIONS.model_copy(update=dict(adjustment_interval=600.0, metric_pulling_interval=300.0)))
    rig.pools_fail = [ValueError("no fleet")]
    await rig.until(310.0)
    await rig.loop.stop()
    assert rig.clock.now_s() == pytest.approx(310.0)


@on_virtual_time
async def test_to_stop_waits_for_the_decision_that_is_being_carried_out() -> None:
    rig = Rig()
    rig.kv, rig.before_act = 0.95, taking(2.0)
    rig.start()
    await rig.until(10.5)
    assert rig.acting
    await rig.loop.stop()
    assert rig.clock.now_s() == pytest.approx(12.0)
    assert len(rig.records) == 1
    assert rig.loop.state is PlannerState.STOPPED
    await asyncio.sleep(60.0)
    assert len(rig.readings) == 10


@on_virtual_time
async def test_it_can_be_started_again_and_begins_a_new_interval() -> None:
    rig = Rig()
    rig.start()
    await rig.until(4.5)
    await rig.loop.stop()
    rig.start()
    await rig.until(14.0)
    assert rig.records == []
    await rig.until(14.6)
    assert rig.decided_at() == pytest.approx([14.5])
    await rig.loop.stop()


# --- loop latency
# How long the planner holds the loop is what lies between two of its awaits, on both clocks.


class Clock:
    """Goes on by what the work says that it takes."""

    def __init__(self) -> None:
        self.elapsed_s = self.cpu_s = 0.0

    def busy(self, elapsed_s: float, cpu_s: float) -> None:
        self.elapsed_s, self.cpu_s = self.elapsed_s + elapsed_s, self.cpu_s + cpu_s

    def holding(self) -> LoopLatency:
        return LoopLatency(lambda: self.elapsed_s, lambda: self.cpu_s)


async def test_the_longest_step_is_kept_and_not_what_is_waited() -> None:
    clock = Clock()
    held = clock.holding()

    async def work() -> str:
        clock.busy(0.25, 0.125)
        await asyncio.sleep(0)
        clock.busy(1.0, 0.25)
        await waits()
        clock.busy(0.5, 0.5)
        return "done"

    async def waits() -> None:
        task = asyncio.create_task(others())
        await task

    async def others() -> None:
        clock.busy(64.0, 64.0)

    assert await held.timed("tick", work()) == "done"
    assert held.longest == {"tick": Longest(1.0, 0.5)}, "by clock: of different steps"


async def test_errors_go_in_and_out_and_are_timed() -> None:
    clock = Clock()
    held = clock.holding()

    async def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            await broken()
        clock.busy(2.0, 1.0)
        raise ValueError("of the work")

    async def broken() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ValueError, match="of the work"):
        await held.timed("tick", fails())
    assert held.longest["tick"] == Longest(2.0, 1.0)


async def test_a_cancellation_reaches_the_work_which_may_end_in_order() -> None:
    clock = Clock()
    held = clock.holding()
    begun, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            clock.busy(3.0, 1.0)
            await asyncio.sleep(0)
            ended.append("in order")
            raise

    task = asyncio.ensure_future(held.timed("passes", work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["in order"]
    assert held.longest["passes"].elapsed_s == 3.0


@on_virtual_time
async def test_a_loop_tells_its_ticks_and_its_sources() -> None:
    rig = Rig()
    rig.start()
    await rig.until(10.5)
    await rig.loop.stop()
    told = rig.loop.counts.as_json()
    assert (told["pulls"], told["decisions"]) == (10, 1)
    held = told["loop_held_max_ms"]
    assert set(held) == {"tick", "loads", "queue"}
    assert all(each["wall"] > 0 and each["cpu"] > 0 for each in held.values())
