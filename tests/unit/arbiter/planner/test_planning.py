"""The planner in its arbiter: options checked whole, what the statefile keeps, what an adopted run goes on with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.errors import BadInput, ConfigError, DynamoError
from dynamo_local.planner.records.decision_log import decision_log_path, read
from dynamo_local.state.schema import PlannerEntry
from tests.fakes.planner.planned_arbiter import QUICK, Arbiter

# --- starting and stopping -------------------------------------------------------------------------


async def test_it_starts_with_the_options_over_those_it_has_and_the_statefile_keeps_them(arbiter: Arbiter) -> None:
    arbiter.planning = arbiter.made(PlannerConfig(max_gpu_budget=6))
    status = await arbiter.planning.start({"adjustment-interval": 5})
    assert (status["state"], status["options"]["max_gpu_budget"]) == ("running", 6)
    assert status["options"]["adjustment_interval"] == 5
    kept = PlannerEntry(state="running", options={"max_gpu_budget": 6, "adjustment_interval": 5.0})
    assert arbiter.kept() == kept
    await arbiter.planning.stop()
    assert arbiter.kept() == kept.model_copy(update={"state": "stopped"})


async def test_its_decisions_are_carried_out_and_logged_and_numbers_go_on(arbiter: Arbiter) -> None:
    arbiter.kv = 0.95
    await arbiter.planning.start(QUICK)
    logged = await arbiter.decisions(2)
    await arbiter.planning.stop()
    assert arbiter.scaled[0] == ("VllmWorker", "+1")
    assert [(record["seq"], record["stimulus_id"]) for record in logged[:2]] == [(1, "planner:1"), (2, "planner:2")]
    await asyncio.gather(*arbiter.tasks)
    last = read(decision_log_path(arbiter.folder))[-1]["seq"]
    arbiter.planning = arbiter.made(PlannerConfig())
    await arbiter.planning.start(QUICK)
    assert [record["seq"] for record in await arbiter.decisions(last + 1)][-1] >= last + 1


async def test_what_runs_cannot_be_started_and_what_is_stopped_not_paused(arbiter: Arbiter) -> None:
    for command in (arbiter.planning.stop, arbiter.planning.pause, arbiter.planning.resume):
        with pytest.raises(DynamoError, match="the planner is stopped"):
            await command()
    await arbiter.planning.start({})
    with pytest.raises(DynamoError, match="running already; `dynamo planner set`"):
        await arbiter.planning.start({})
    await arbiter.planning.pause()
    with pytest.raises(DynamoError, match="paused already"):
        await arbiter.planning.start({})
    assert (await arbiter.planning.pause())["state"] == "paused"
    assert (await arbiter.planning.resume())["state"] == "running"


# --- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_gpu_budget": 6, "decode_kv_scale_up_threshold": 0.4}, "decode_kv_scale_down_threshold"),
        ({"max_gpu_budget": 6, "adjustment_interval": 0.5}, "metric_pulling_interval"),
        ({"max_gpu_budget": 1}, "max_gpu_budget is 1, but one worker of each role needs 2"),
        ({"max_gpu_budget": 6, "decode_engine_num_gpu": 2}, "decode_engine_num_gpu is 2"),
        ({"max_gpu_budget": 6, "served_model_name": "llama"}, "'llama'.*'sim-tiny'"),
        ({"max_gpu_budget": 6, "namespace": "other"}, "'other'.*'dynamo'"),
        ({"max_gpu_budget": 6, "adjustment_intervall": 3}, "adjustment_intervall"),
        ({"max_gpu_budget": "many"}, "max_gpu_budget"),
        ({"max_gpu_budget": 6, "log_dir": "/elsewhere"}, "log_dir can be chosen at the start only"),
        ({"max_gpu_budget": 6, "enabled": False}, "say start or stop"),
        ({}, "say what to change"),
    ],
)
async def test_options_are_checked_as_a_whole_and_nothing_changes_where_one_is_wrong(
    arbiter: Arbiter, options: dict[str, Any], told: str
) -> None:
    await arbiter.planning.start({})
    before = arbiter.kept()
    with pytest.raises(BadInput, match=told):
        await arbiter.planning.set(options)
    assert arbiter.planning.status()["options"]["max_gpu_budget"] == 8
    assert arbiter.kept() == before


async def test_another_policy_begins_at_run_time_with_options_of_its_own(arbiter: Arbiter) -> None:
    await arbiter.planning.start({**QUICK, "max_gpu_budget": 6})
    options = (await arbiter.planning.set({"policy": "throughput-load", "ttft": 300}))["options"]
    assert (options["policy"], options["ttft_ms"], options["max_gpu_budget"]) == ("throughput-load", 300, 6)
    assert "decode_kv_scale_up_threshold" not in options
    assert arbiter.planning.state == "running"
    assert arbiter.kept() == PlannerEntry(
        state="running",
        options={"policy": "throughput-load", "ttft_ms": 300, "max_gpu_budget": 6, "metric_pulling_interval": 0.2},
    )
    options = (await arbiter.planning.set({"policy": "load"}))["options"]
    assert (options["policy"], options["adjustment_interval"]) == ("load", 30)


async def test_targets_bring_slo_where_nobody_has_named_a_policy_and_only_there(arbiter: Arbiter) -> None:
    await arbiter.planning.start({**QUICK, "max_gpu_budget": 6})
    options = (await arbiter.planning.set({"ttft": 300}))["options"]
    assert (options["policy"], options["ttft_ms"], options["max_gpu_budget"]) == ("slo", 300, 6)
    kept = {"policy": "slo", "ttft_ms": 300, "max_gpu_budget": 6, "metric_pulling_interval": 0.2}
    assert arbiter.kept() == PlannerEntry(state="running", options=kept)
    assert (await arbiter.planning.set({"itl": 20}))["options"]["policy"] == "slo"
    await arbiter.planning.set({"policy": "load"})
    with pytest.raises(ConfigError, match="and the policy is load"):
        await arbiter.planning.set({"ttft_ms": 300})
    await arbiter.planning.set({"policy": "throughput-load"})
    assert (await arbiter.planning.set({"ttft": 300}))["options"]["policy"] == "throughput-load"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "sla"}, "profile-results-dir"),
        ({"policy": "sla", "profile-results-dir": "/nowhere"}, "/nowhere"),
        ({"policy": "load", "ttft": 300}, "ttft.*load"),
        ({"ttft": 300, "decode-kv-scale-up-threshold": 0.8}, "is an option of the policy load, and the policy is slo"),
        ({"policy": "throughput-load", "prefill-queue-scale-up-threshold": 1}, "is an option of the policy load"),
        ({"policy": "fast"}, "policy"),
    ],
)
async def test_a_policy_that_cannot_be_changes_nothing(arbiter: Arbiter, options: dict[str, Any], told: str) -> None:
    await arbiter.planning.start(QUICK)
    before = arbiter.planning.status()["options"]
    with pytest.raises(DynamoError, match=told):
        await arbiter.planning.set(options)
    assert arbiter.planning.status()["options"] == before
    assert arbiter.planning.state == "running"


async def test_a_start_that_is_refused_starts_nothing(arbiter: Arbiter) -> None:
    with pytest.raises(ConfigError, match="max_gpu_budget"):
        await arbiter.planning.start({"max_gpu_budget": 1})
    assert (arbiter.planning.status()["state"], arbiter.kept()) == ("stopped", None)


async def test_set_applies_at_once_and_to_the_next_start_of_a_stopped_planner(arbiter: Arbiter) -> None:
    await arbiter.planning.set({**QUICK, "no_operation": True})
    assert arbiter.planning.status()["state"] == "stopped"
    arbiter.kv = 0.95
    await arbiter.planning.start({})
    await arbiter.decisions(1)
    assert arbiter.scaled == []
    await arbiter.planning.set({"no-operation": False})
    seen = len(await arbiter.decisions(1))
    await arbiter.decisions(seen + 2)
    assert ("VllmWorker", "+1") in arbiter.scaled


# --- with the run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "flag", "by_default", "state"),
    [
        (None, None, False, "stopped"),
        (None, None, True, "running"),
        (None, True, True, "running"),
        (None, False, False, "stopped"),
        ("running", None, False, "running"),
        ("paused", None, True, "paused"),
        ("stopped", None, True, "stopped"),
        ("paused", True, False, "running"),
        ("running", False, True, "stopped"),
    ],
)
async def test_an_adopted_run_goes_on_as_it_was_unless_the_command_line_says_otherwise(
    arbiter: Arbiter, entry: Any, flag: bool | None, by_default: bool, state: str
) -> None:
    if entry is not None:
        arbiter.statefile.head.planner = PlannerEntry(state=entry, options={"max_gpu_budget": 5})
    await arbiter.planning.begin(starts=flag, by_default=by_default)
    status = arbiter.planning.status()
    assert status["state"] == state
    assert status["options"]["max_gpu_budget"] == (8 if entry is None else 5)
    if state != "stopped" or entry == "running":
        assert getattr(arbiter.kept(), "state", None) == state


async def test_options_of_before_that_cannot_be_any_more_do_not_end_the_run(arbiter: Arbiter) -> None:
    arbiter.statefile.head.planner = PlannerEntry(state="running", options={"max_gpu_budget": 1})
    await arbiter.planning.begin(starts=None, by_default=True)
    assert arbiter.planning.status()["state"] == "stopped"
    assert "the planner was not started: Planner: max_gpu_budget" in arbiter.told[0]
    assert arbiter.told.notes == arbiter.told
    await arbiter.planning.start({"max_gpu_budget": 8})
    assert arbiter.told.notes == []


async def test_whoever_looks_on_may_refuse_a_start(arbiter: Arbiter) -> None:
    async def no(_: PlannerConfig) -> None:
        raise ConfigError("log_dir: no such disk")

    arbiter.planning.subscribe(on_start=no)
    with pytest.raises(ConfigError, match="no such disk"):
        await arbiter.planning.start({"max_gpu_budget": 5})
    assert arbiter.planning.status()["state"] == "stopped"
    assert arbiter.planning.status()["options"]["max_gpu_budget"] == 8


async def test_a_persons_change_reaches_the_planner(arbiter: Arbiter) -> None:
    await arbiter.planning.start({"adjustment_interval": 5})
    first = arbiter.planning.status()["next_decision_s"]
    async with asyncio.timeout(10.0):
        while arbiter.planning.status()["next_decision_s"] > first - 0.05:
            await asyncio.sleep(0.005)
    arbiter.planning.on_manual_change()
    assert first - 0.04 < arbiter.planning.status()["next_decision_s"] <= 5.0, "a whole interval again"


# --- another environment ---------------------------------------------------------------------------

VIRTUAL = {**QUICK, "environment": "virtual", "backend": "vllm"}


async def test_in_a_virtual_environment_it_writes_its_decisions_and_scales_nothing(arbiter: Arbiter) -> None:
    arbiter.kv = 0.95
    await arbiter.planning.start(VIRTUAL)
    (record,) = (await arbiter.decisions(1))[:1]
    assert record["outcomes"]["VllmWorker"]["outcome"] == "written"
    kvs, _ = await arbiter.etcd.get_prefix("v1/dynamo/planner/")
    found = {kv.key.rpartition("/")[2]: kv.value for kv in kvs}
    assert found == {"num_prefill_workers": b"1", "num_decode_workers": b"2", "decision_id": b"0"}
    assert arbiter.scaled == []
    pulls = arbiter.planning.counts.pulls
    async with asyncio.timeout(10.0):
        while arbiter.planning.counts.pulls < pulls + 5:  # more than two intervals
            await asyncio.sleep(0.01)
    assert len(await arbiter.decisions(1)) == 1
    status = arbiter.planning.status()
    assert (status["adjusting"], status["virtual"]["pending"]) == (True, True)
    await arbiter.etcd.put("v1/dynamo/planner/scaled_decision_id", b"0")
    assert (await arbiter.decisions(2))[1]["outcomes"]["VllmWorker"]["outcome"] == "skipped"
    assert arbiter.planning.status()["virtual"]["scaled_decision_id"] == 0


async def test_the_old_layout_is_an_option(arbiter: Arbiter) -> None:
    arbiter.kv = 0.95
    await arbiter.planning.start({**VIRTUAL, "virtual-keys": "v0"})
    await arbiter.decisions(1)
    assert await arbiter.etcd.get("/dynamo/planner/decision_id") is not None


async def test_a_blocking_planner_can_be_stopped_at_once(arbiter: Arbiter) -> None:
    arbiter.kv = 0.95
    await arbiter.planning.start({**VIRTUAL, "virtual-blocking": True})
    async with asyncio.timeout(10.0):
        while await arbiter.etcd.get("v1/dynamo/planner/decision_id") is None:
            await asyncio.sleep(0.01)
        await arbiter.planning.stop()
    (record,) = await arbiter.decisions(1)
    assert record["outcomes"]["VllmWorker"] == {
        **record["outcomes"]["VllmWorker"],
        "outcome": "written",
        "decision_id": 0,
        "acknowledged": False,
    }


async def test_where_decisions_go_is_chosen_at_the_start(arbiter: Arbiter) -> None:
    await arbiter.planning.start(QUICK)
    for option, value in (("environment", "virtual"), ("virtual-keys", "v0")):
        with pytest.raises(BadInput, match="can be chosen at the start only"):
            await arbiter.planning.set({option: value})
    await arbiter.planning.stop()
    assert arbiter.planning.status()["virtual"] is None
    await arbiter.planning.start({"environment": "virtual"})
    await arbiter.planning.set({"virtual-max-wait": 5, "virtual-blocking": True})
    assert arbiter.planning.status()["virtual"]["keys"] == "v1/dynamo/planner/"
    await arbiter.planning.stop()
    await arbiter.planning.start({"environment": "local"})
    assert arbiter.planning.status()["virtual"] is None


async def test_a_virtual_environment_without_etcd_is_no_start(arbiter: Arbiter) -> None:
    arbiter.etcd.available = False
    with pytest.raises(DynamoError, match="etcd does not answer"):
        await arbiter.planning.start({"environment": "virtual"})
    assert arbiter.planning.status()["state"] == "stopped"


async def test_it_stays_stopped_where_another_planner_is_followed(arbiter: Arbiter) -> None:
    arbiter.planning = arbiter.made(PlannerConfig(), follows=lambda: {"phase": "waiting"})
    with pytest.raises(DynamoError, match="carries out another planner's decisions"):
        await arbiter.planning.start({})
    assert arbiter.planning.status()["follow"] == {"phase": "waiting"}
