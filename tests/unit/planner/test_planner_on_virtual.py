"""The planner's loop through a connector that takes whole decisions: one writing each, and a hold while it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dynamo_local.planner.connectors import Refused, Written
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records.decision_log import Outcome, from_line, to_line
from tests.fakes.planner.planner_loop import DECODE, PREFILL, Rig, on_virtual_time


class Whole:
    """Records what is wanted; answers as told."""

    whole = True

    def __init__(self, answer: Written | Refused) -> None:
        self.answer = answer
        self.wanted: list[dict[str, int]] = []

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Written | Refused:
        self.wanted.append(dict(targets))
        return self.answer

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Written | Refused:
        raise AssertionError("a whole decision is not taken apart")

    remove_component = add_component


@on_virtual_time
async def test_both_roles_go_as_one_decision_with_the_numbers_of_both() -> None:
    for depth, wanted in ((0, {PREFILL: 1, DECODE: 3}), (9, {PREFILL: 2, DECODE: 3})):
        rig, whole = Rig(prefill=1, decode=2), Whole(Written(7))
        rig.loop.act_through(whole)
        rig.kv, rig.depth_now = 0.95, depth
        rig.start()
        await rig.until(rig.clock.now_s() + 10.5)
        assert whole.wanted == [wanted]
        (record,) = rig.records
        assert {outcome.outcome for outcome in record.outcomes.values()} == {Outcome.WRITTEN}
        assert record.outcomes[DECODE].decision_id == 7
        await rig.loop.stop()


@on_virtual_time
async def test_a_hold_writes_nothing_and_no_operation_neither() -> None:
    whole = Whole(Written(0))
    for kv, no_operation in ((0.7, False), (0.95, True)):
        rig = Rig()
        rig.loop.act_through(whole)
        rig.kv = kv
        rig.start(no_operation=no_operation)
        await rig.until(rig.clock.now_s() + 10.5)
        assert len(rig.records) == 1
        await rig.loop.stop()
    assert whole.wanted == []


@on_virtual_time
async def test_while_a_decision_waits_nothing_is_decided_and_then_the_interval_begins_anew() -> None:
    rig, whole = Rig(), Whole(Written(0))
    rig.loop.act_through(whole)
    rig.kv = 0.95
    rig.start()
    await rig.until(10.5)
    rig.pools = replace(rig.pools, pending=True)
    await rig.until(60.5)
    assert len(whole.wanted) == 1
    rig.pools = replace(rig.grown(decode=2), pending=False)
    await rig.until(70.5)
    assert len(whole.wanted) == 1
    await rig.until(71.5)
    assert whole.wanted[1:] == [{PREFILL: 1, DECODE: 3}]
    await rig.loop.stop()


@on_virtual_time
async def test_what_became_of_it_is_told_in_words_and_survives_the_log() -> None:
    cases = {
        Written(7): "VllmWorker: written to etcd as decision 7",
        Written(7, acknowledged=True): "VllmWorker: written to etcd as decision 7, which was carried out",
        Written(7, acknowledged=False): "VllmWorker: written to etcd as decision 7, which nobody has acknowledged",
        Written(None): "VllmWorker: nothing written, etcd says the same already",
        Refused("decision 6 is not acknowledged yet", "not_acknowledged", retryable=True): "VllmWorker: refused "
        "(decision 6 is not acknowledged yet); it is decided again by the next interval",
    }
    for answer, words in cases.items():
        rig = Rig()
        rig.loop.act_through(Whole(answer))
        rig.kv = 0.95
        rig.start()
        await rig.until(rig.clock.now_s() + 10.5)
        (record,) = rig.records
        assert from_line(to_line(record)) == record
        assert decisions.describe(decisions.as_json(record)).splitlines()[-1] == words
        await rig.loop.stop()
