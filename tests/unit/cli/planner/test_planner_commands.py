"""`dynamo planner …` as it is typed: words, exit codes, JSON; and its line in `dynamo status`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dynamo_local.cli.planner import planner, plugin_lines
from dynamo_local.cli.planner_words import status_line
from dynamo_local.config.planner import options_of
from dynamo_local.core.types import Load
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING, EXIT_OK
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.records.decision_log import (
    DecisionLog,
    DecisionRecord,
    Outcome,
    StepOutcome,
    as_json,
    decision_log_path,
    inputs_of,
)
from dynamo_local.planner.values import FixedFleet, IntervalObservation, Pool, Reading, WorkerPools
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.arbiter.scripted_arbiter import ScriptedArbiter, dynamo
from tests.fakes.planner.options import load_options
from tests.fakes.profile_folders import decode_arrays, prefill_arrays, write_json, write_npz

STATUS: dict[str, Any] = {
    "state": "running",
    "no_operation": False,
    "options": {"adjustment_interval": 30.0, "max_gpu_budget": 8, "served_model_name": None, "no_operation": False},
    "for_s": 12.0,
    "adjusting": False,
    "next_decision_s": 18.0,
    "waiting_for_gpus": [],
    "pulls": 12,
    "decisions": 0,
    "failed_ticks": 0,
    "lag_s": 0.001,
    "loop_held_max_ms": {"tick": {"wall": 2.5, "cpu": 1.25}, "passes": {"wall": 7.125, "cpu": 0.5}},
    "trouble": None,
    "last_decision": None,
}
VALUES = {
    "policy": "load",
    "served_model_name": "7",
    "environment": "virtual",
    "backend": "vllm",
    "virtual_keys": "v0",
    "virtual_max_wait": "60",
    "log_dir": "/tmp/boards",
    "report_interval_hours": "12",
    "metric_pulling_interval": "0.5",
    "adjustment_interval": "5",
    "decode_kv_scale_up_threshold": "0.8",
    "decode_kv_scale_down_threshold": "0.3",
    "decode_kv_per_waiting_request": "0.02",
    "prefill_queue_scale_up_threshold": "2",
    "prefill_queue_scale_down_threshold": "1",
    "max_gpu_budget": "6",
    "min_gpu_budget": "2",
    "decode_engine_num_gpu": "1",
    "prefill_engine_num_gpu": "1",
    "actuators": "start,wake,flip",
}


def record(number: int, kv: float = 0.95) -> DecisionRecord:
    """A decision of one decode worker, whose step was carried out if there was one."""
    fleet = WorkerPools(None, Pool("VllmWorker", 1, ready=1, gpus_held=1))
    reading = Reading(9.0, None, {"dynamo_VllmWorker": Load(gpu_cache_usage_perc=kv)})
    observation = IntervalObservation(10.0, 0.0, (reading,), fleet)
    decision = LoadPolicy(load_options()).on_tick(observation)
    done = StepOutcome(Outcome.COMMITTED, ("dynamo_VllmWorker_1",))
    return DecisionRecord(
        1.8e9 + number,
        f"planner:{number}",
        inputs_of(observation, load_options()),
        decision,
        {component: done for component, _ in decision.acts},
    )


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DecisionLog:
    """The decision log of the namespace `dynamo`, empty."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_LOCAL_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    (tmp_path / "logs" / "dynamo").mkdir(parents=True)
    return DecisionLog(decision_log_path(tmp_path / "logs" / "dynamo"))


@pytest.fixture
def arbiter(monkeypatch: pytest.MonkeyPatch) -> ScriptedArbiter:
    """Answers every command with the status of a running planner."""
    return ScriptedArbiter({"planner": STATUS}).install(monkeypatch)


# --- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_start_takes_every_option_in_either_spelling(
    monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter, spelling: str
) -> None:
    words = [f"--{name.replace('_', spelling)}={value}" for name, value in VALUES.items()]
    flags = [f"--no{spelling}operation", f"--virtual{spelling}blocking"]
    assert dynamo(monkeypatch, "planner", "start", *words, *flags) == EXIT_OK
    ((command, asked),) = arbiter.asked
    assert command == "dynamo_planner_start"
    options = asked["options"]
    assert set(options) == set(options_of("load")) - {"enabled", "namespace", "scheduling", "plugin_registration"}
    assert options["served_model_name"] == "7", "a name that looks like a number stays one"
    assert (options["adjustment_interval"], options["decode_kv_scale_up_threshold"]) == (5, 0.8)
    assert options["no_operation"] is True


def test_start_takes_the_options_of_any_policy_by_any_name(
    monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter
) -> None:
    words = ("--policy=throughput-load", "--ttft", "300", "--load-adjustment-interval=2")
    assert dynamo(monkeypatch, "planner", "start", *words, "--enable-throughput-scaling=false") == EXIT_OK
    assert arbiter.asked[0][1]["options"] == {
        "policy": "throughput-load",
        "ttft_ms": 300,
        "load_adjustment_interval_seconds": 2,
        "enable_throughput_scaling": False,
    }


def test_the_help_of_start_has_plain_text_and_real_defaults() -> None:
    text = CliRunner().invoke(planner, ["start", "--help"]).output
    assert "PydanticUndefined" not in text
    assert "](" not in text
    assert "[default: 30.0]" in text


def test_start_without_options_sends_none(monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter) -> None:
    assert dynamo(monkeypatch, "planner", "start") == EXIT_OK
    assert arbiter.asked == [("dynamo_planner_start", {"options": {}})]


def test_a_relative_log_dir_is_one_of_the_callers(
    monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    dynamo(monkeypatch, "planner", "start", "--log-dir", "boards")
    assert arbiter.asked[0][1]["options"] == {"log_dir": str(tmp_path / "boards")}


def test_a_relative_profile_is_one_of_the_callers_unless_it_ships(
    monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    dynamo(monkeypatch, "planner", "set", "profile-results-dir=mine", "load-predictor-warmup-trace=past.jsonl")
    dynamo(monkeypatch, "planner", "set", f"profile-results-dir={DEFAULT_PROFILE}")
    assert [asked[1]["options"] for asked in arbiter.asked] == [
        {"profile_results_dir": str(tmp_path / "mine"), "load_predictor_warmup_trace": str(tmp_path / "past.jsonl")},
        {"profile_results_dir": DEFAULT_PROFILE},
    ]


def test_set_sends_all_settings_at_once(monkeypatch: pytest.MonkeyPatch, arbiter: ScriptedArbiter) -> None:
    words = ["decode-kv-scale-up-threshold=0.8", "max_gpu_budget=6", "no-operation=false", "served-model-name=none"]
    assert dynamo(monkeypatch, "planner", "set", *words) == EXIT_OK
    expected = {
        "decode_kv_scale_up_threshold": 0.8,
        "max_gpu_budget": 6,
        "no_operation": False,
        "served_model_name": None,
    }
    assert arbiter.asked == [("dynamo_planner_set", {"options": expected})]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["set"], "Missing argument"),
        (["set", "max-gpu-budget"], "'max-gpu-budget' is no KEY=VALUE"),
        (["set", "=6"], "'=6' is no KEY=VALUE"),
        (["set", "max-gpu-budgett=6"], "'max-gpu-budgett' is no option of the planner"),
        (["start", "--max-gpu-budgett", "6"], "No such option"),
        (["explain", "0"], "0 is not in the range"),
        (["history", "many"], "'many' is not a valid integer"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_is_told_and_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arbiter: ScriptedArbiter,
    words: list[str],
    told: str,
) -> None:
    assert dynamo(monkeypatch, "planner", *words) == EXIT_BAD_INPUT
    assert told in capsys.readouterr().err
    assert arbiter.asked == []


def test_a_refusal_of_the_arbiter_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {"status": "error", "reason": "Planner: max_gpu_budget: must be 1 or more", "exit_code": EXIT_BAD_INPUT}
    ScriptedArbiter(reply).install(monkeypatch)
    assert dynamo(monkeypatch, "planner", "set", "max-gpu-budget=0") == EXIT_BAD_INPUT
    assert capsys.readouterr().err == "dynamo: Planner: max_gpu_budget: must be 1 or more\n"


@pytest.mark.parametrize("command", ["start", "stop", "pause", "resume", "status"])
def test_where_nothing_runs_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert dynamo(monkeypatch, "planner", command) == EXIT_NOT_RUNNING
    assert "nothing runs in namespace 'dynamo'" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_python_m_planner_starts_it_in_the_running_arbiter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool
) -> None:
    """As Dynamo's own is started; without a graph it is a clear error."""
    arbiter = ScriptedArbiter({"planner": STATUS})
    if installed:
        arbiter.install(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["planner", "--max-gpu-budget", "4", "--namespace", "dynamo"])
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("dynamo_local.planner", run_name="__main__")
    if installed:
        assert arbiter.asked == [("dynamo_planner_start", {"options": {"max_gpu_budget": 4}})]
        assert not exited.value.code
    else:
        assert exited.value.code == EXIT_NOT_RUNNING
        assert "nothing runs in namespace 'dynamo'" in capsys.readouterr().err


# --- answers ---------------------------------------------------------------------------------------


def test_json_is_the_planners_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arbiter: ScriptedArbiter
) -> None:
    for command in ("start", "stop", "pause", "resume", "status"):
        dynamo(monkeypatch, "planner", command, "--json")
        assert json.loads(capsys.readouterr().out) == STATUS
    assert [command for command, _ in arbiter.asked][-1] == "dynamo_planner_status"


def test_status_tells_state_next_decision_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arbiter: ScriptedArbiter
) -> None:
    dynamo(monkeypatch, "planner", "status")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "planner   running, every 30 s",
        "next      in 18.0 s",
        "counts    12 pulls, 0 decisions, 0 failed ticks",
        "loop      held for 7.1 ms at most (passes; CPU 0.5 ms)",
    ]
    assert lines[4:] == ["", f"({len(STATUS['options'])} other options have their defaults: --json shows them)"]


def test_explain_has_the_numbers_and_what_became_of_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: DecisionLog
) -> None:
    log.append([as_json(record(1, kv=0.7)), as_json(record(2))])
    assert dynamo(monkeypatch, "planner", "explain") == EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("decision 2, ")
    assert "VllmWorker +1 (scale_up): KV load 0.95 > 0.9" in out
    assert "VllmWorker: carried out on dynamo_VllmWorker_1" in out
    dynamo(monkeypatch, "planner", "explain", "5", "--json")
    told = json.loads(capsys.readouterr().out)
    assert [decision["seq"] for decision in told] == [1, 2]
    assert "holds" in told[0]["words"]


def test_history_is_a_line_a_decision_and_can_leave_holds_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: DecisionLog
) -> None:
    log.append([as_json(record(n, kv=0.95 if n == 2 else 0.7)) for n in (1, 2, 3)])
    dynamo(monkeypatch, "planner", "history", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["planner:2", "planner:3"]
    assert "VllmWorker +1 (scale up; committed)" in lines[0]
    assert lines[1].endswith("VllmWorker hold (within)  [kv 0.70]")
    dynamo(monkeypatch, "planner", "history", "--changes", "--json")
    assert [decision["seq"] for decision in json.loads(capsys.readouterr().out)] == [2]


@pytest.mark.parametrize("command", ["explain", "history"])
def test_without_a_decision_it_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert dynamo(monkeypatch, "planner", command) == EXIT_NOT_RUNNING
    assert "decisions.jsonl" in capsys.readouterr().err


def test_dynamo_status_has_one_line_of_it() -> None:
    last = as_json(record(17))
    assert status_line({**STATUS, "state": "stopped"}) is None
    assert status_line(None) is None
    assert status_line(STATUS) == "running, every 30 s"
    line = status_line({**STATUS, "last_decision": last}) or ""
    assert line.startswith("running, every 30 s; last: planner:17 at ")
    assert line.endswith(": VllmWorker +1 (scale up; committed)")
    assert status_line({**STATUS, "trouble": "holds: etcd does not answer"}) == (
        "running, every 30 s: holds: etcd does not answer"
    )
    assert status_line({**STATUS, "state": "paused"}) == "paused"
    fixed = FixedFleet(23.5, 0.991, 7.7, (0, 1), 0.992, 7.0).as_json()
    assert status_line({**STATUS, "fixed_fleet": fixed}) == (
        "running, every 30 s; 10.0 % more GPU-hours than the fixed fleet of 1 worker "
        "(last 23.5 h; 99.1 % kept, the fixed fleet 99.2 %)"
    )


def test_a_report_is_written_from_the_log_and_none_without_a_decision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: DecisionLog, tmp_path: Path
) -> None:
    to = tmp_path / "report.html"
    assert dynamo(monkeypatch, "planner", "report", "-o", str(to)) == EXIT_NOT_RUNNING
    log.append(as_json(record(number)) for number in (1, 2))
    assert dynamo(monkeypatch, "planner", "report", "-o", str(to), "--json") == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told == {"report": str(to), "decisions": 2, "bytes": to.stat().st_size}
    assert "Planner of dynamo" in to.read_text()
    assert dynamo(monkeypatch, "planner", "report", "--since", "yesterday-ish") == EXIT_BAD_INPUT
    assert dynamo(monkeypatch, "planner", "report", "-o", str(tmp_path / "no" / "r.html")) == EXIT_BAD_INPUT


# --- planner profile
# `dynamo planner profile show`: table, JSON, page, and what it refuses.

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:

    def run(*words: str) -> tuple[int, str, str]:
        code = dynamo(monkeypatch, "planner", "profile", "show", *words)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_the_table_has_each_point_and_the_most_within_a_target(show: Command) -> None:
    """Measured beside what is taken; where the curve is not the points, a note."""
    code, out, _ = show(DEFAULT_PROFILE, "--itl", "10", "--isl", "3000", "--osl", "300")
    assert code == EXIT_OK
    lines = [line.split() for line in out.splitlines()]
    assert ["6202", "123.24", "123.24", "50,326", "50,326"] in lines
    assert any(line[:2] == ["3000", "–"] for line in lines)
    assert any(line[:2] == ["3150", "10"] and line[2] == "4,605" for line in lines)
    assert "note: ITL falls at context 350 as the load rises, from 46.65 to 40.96 ms" in out


def test_json_has_the_same_and_says_what_is_extrapolated(show: Command) -> None:
    code, out, _ = show(DEFAULT_PROFILE, "--json", "--isl", "50000", "--itl", "1")
    assert code == EXIT_OK
    told = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    assert [row["isl"] for row in told["prefill"] if row["extrapolated"]] == [50_000]
    assert len(told["decode"]) == 41
    assert {row["attainable"] for row in told["best"]} == {False}
    assert told["measured"]["isl"] == [100, 16372]


def test_a_context_with_one_point_is_told_and_left_out(show: Command, tmp_path: Path) -> None:
    decode = decode_arrays()
    added = {"x_kv_usage": 0.9, "y_context_length": 90_000.0, "z_itl": 14.01, "z_thpt_per_gpu": 36.0}
    code, out, _ = show(write_npz(tmp_path, decode=decode | {k: [*decode[k], v] for k, v in added.items()}))
    assert code == EXIT_OK
    assert "note: context 90000 has one point only, and is left out" in out


@pytest.mark.full
def test_the_page_is_self_contained_and_the_same_every_time(show: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages = []
    for name in ("one.html", "two.html"):
        code, out, _ = show(DEFAULT_PROFILE, "--report", str(tmp_path / name))
        assert code == EXIT_OK
        assert f"report: {tmp_path / name}" in out
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert len(pages[0]) < 1_000_000
    assert pages[0].count("<svg") == 1
    for absent in ("<script", 'src="http', "<link", "not attainable</td><td>"):
        assert absent not in pages[0]
    for there in (DEFAULT_PROFILE, "ITL falls at context 350", "extrapolated", "4,833"):
        assert there in pages[0]


def test_a_page_that_cannot_be_written_is_refused(show: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, error = show(DEFAULT_PROFILE, "--report", str(tmp_path / "nowhere" / "page.html"))
    assert code == EXIT_BAD_INPUT
    assert "nowhere" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("b200",), "no engine profile 'b200'"),
        ((DEFAULT_PROFILE, "--osl", "300"), "give both"),
        ((DEFAULT_PROFILE, "--itl", "0"), "--itl"),
        ((DEFAULT_PROFILE, "--isl", "nan"), "--isl"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: tuple[str, ...], told: str, show: Command) -> None:
    code, _, error = show(*words)
    assert code == EXIT_BAD_INPUT
    assert told in error


def test_a_profile_that_a_planner_cannot_size_by_is_refused(show: Command, tmp_path: Path) -> None:
    prefill = prefill_arrays()
    del prefill["prefill_thpt_per_gpu"]
    code, _, error = show(write_json(tmp_path, prefill))
    assert code == EXIT_BAD_INPUT
    assert "prefill_thpt_per_gpu" in error


# --- planner plugins
# `dynamo planner plugins`: what a person sees of them.

HERE = {
    "plugin_id": "office-hours",
    "plugin_type": "propose",
    "priority": 5,
    "circuit_state": "OPEN",
    "evaluations_total": 132,
    "last_call_seconds_ago": 0.42,
    "endpoint": "unix:/tmp/p.sock",
    "origin": "gateway",
    "trouble": "UNAVAILABLE: nobody listens",
}


def test_the_table_and_what_is_wrong() -> None:
    told = {
        "plugins": [HERE, {**HERE, "plugin_id": "b", "last_call_seconds_ago": None, "trouble": None}],
        "not_taken": {"old": "protocol_version_unsupported"},
        "gateway": "unix:///run/plugins.sock",
        "last_tick": {"action": "skip_short_circuit", "why": "b rejects: a freeze"},
    }
    assert list(plugin_lines(told)) == [
        "plugin        stage    priority  circuit  calls  last       at",
        "office-hours  propose  5         open     132    0.4 s ago  unix:/tmp/p.sock (gateway)",
        "b             propose  5         open     132    -          unix:/tmp/p.sock (gateway)",
        "office-hours: UNAVAILABLE: nobody listens",
        "old: not taken: protocol_version_unsupported",
        "register at unix:///run/plugins.sock",
        "last tick: skip_short_circuit: b rejects: a freeze",
    ]


def test_nobody_is_told_in_words() -> None:
    nobody = {"plugins": [], "not_taken": {}, "gateway": None, "last_tick": {"action": "apply", "why": ""}}
    assert list(plugin_lines(nobody)) == ["no plugins"]
