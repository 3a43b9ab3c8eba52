"""`dynamo simulate`: what it prints, that it is the same every time, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo_local.cli.simulate import with_defaults, with_planner_targets
from dynamo_local.errors import BadInput
from dynamo_local.profile.document import write_document
from dynamo_local.simulator.generator import generate, parse_generated
from dynamo_local.simulator.trace import read_trace
from dynamo_local.system.pages import check_plots
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.fakes.profile_documents import document, engine
from tests.fakes.profile_folders import SLOW_KV_TOKENS, slow_engine

TRACE = Path(__file__).parents[3] / "examples" / "llm" / "traces" / "sin_5-20.jsonl.gz"
KEYS = [
    "requests",
    "completed",
    "dropped",
    "attainment",
    "goodput_rps",
    "gpu_hours",
    "scale_actions",
    "ttft_ms",
    "itl_ms",
]
SMALL = ("--trace", str(TRACE), "--limit", "60")


def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    code = dynamo(monkeypatch, "simulate", *words)
    told = capsys.readouterr()
    return code, told.out, told.err


def elsewhere(*words: str) -> str:
    """The command's output in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_local.cli.main", "simulate", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_a_terminal_sees_how_far_it_is_and_a_pipe_gets_the_answer_alone() -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "dynamo_local.cli.main", "simulate", *SMALL, "--static", "1,1", "--static", "0,2"]
    with subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        told = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while more := os.read(ours, 4096):
                told += more
        out = running.communicate(timeout=60)[0]
    os.close(ours)
    assert re.search(rb"runs .*2/2", told)
    assert [row["requests"] for row in json.loads(out)] == [60, 60]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *words: simulate(capsys, monkeypatch, *words)


def test_json_of_one_run_has_the_promised_keys(command: Any) -> None:
    code, out, _ = command(*SMALL, "--ttft", "500", "--itl", "50", "--json")
    row = json.loads(out)
    assert code == 0
    assert list(row)[: len(KEYS)] == KEYS
    assert (row["requests"], row["completed"], row["dropped"]) == (60, 60, 0)
    assert 0 <= row["attainment"] <= 1
    for spread in (row["ttft_ms"], row["itl_ms"]):
        assert list(spread) == ["mean", "p50", "p95", "p99"]
        assert 0 < spread["p50"] <= spread["p95"] <= spread["p99"]


def test_its_progress_is_said_on_stderr_where_that_is_wanted(command: Any) -> None:
    _, out, err = command(*SMALL, "--jobs", "1", "--static", "1,1", "--progress", "--json")
    shares = [float(line.removeprefix("progress ")) for line in err.splitlines()]
    assert json.loads(out)["requests"] == 60
    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0
    assert command(*SMALL, "--jobs", "1", "--static", "1,1", "--json")[2] == ""


def test_what_was_dropped_is_explained_with_the_option_that_changes_it(command: Any) -> None:
    words = (*SMALL, "--trace-speed", "1000", "--static", "0,1", "--sim.max-num-seqs=1")
    _, queued, _ = command(*words)
    assert "max-inflight 8192, max-num-waiting 8192 for each worker, request-timeout 600 s" in " ".join(queued.split())
    assert "dropped:" not in queued
    for bound, status in (("--max-inflight", "429"), ("--max-num-waiting", "429"), ("--request-timeout-s", "504")):
        _, out, _ = command(*words, bound, "1")
        told = " ".join(out.split())
        assert " dropped: " in told
        assert bound in told
        assert status in told


def test_a_measured_profile_brings_its_engines_limits_and_cold_start(command: Any, tmp_path: Path) -> None:
    """They were the H200's, whatever engine the folder was measured of; and what the user says counts more."""
    folder = Path(slow_engine(tmp_path / "measured"))
    engines = {"agg": replace(engine(), max_kv_tokens=SLOW_KV_TOKENS, context_length=8192, max_num_seqs=1)}
    write_document(folder, document(engines=engines, actions={"VllmWorker": {"cold": 71.5}}))
    words = (*SMALL, "--static", "1,1", "--profile", str(folder), "--always-remote")
    slow, quick = (json.loads(command(*words, *more, "--json")[1]) for more in ((), ("--sim.max-num-seqs=8",)))
    assert slow["itl_ms"]["mean"] < quick["itl_ms"]["mean"]  # one sequence at a time
    assert slow["ttft_ms"]["mean"] > quick["ttft_ms"]["mean"]
    assert "start-up 71.5 s" in command(*words)[1]
    assert "start-up 5 s" in command(*words, "--start-up-s", "5")[1]


def test_static_alone_is_one_run_and_with_the_planner_two(command: Any) -> None:
    _, alone, _ = command(*SMALL, "--static", "2,2", "--json")
    assert json.loads(alone)["name"] == "static 2P2D"
    _, both, _ = command(*SMALL, "--static", "2,2", "--planner.adjustment-interval=10", "--json", "--jobs", "1")
    rows = json.loads(both)
    assert [row["name"] for row in rows] == ["planner from 1P1D", "static 2P2D"]
    assert rows[1] == json.loads(alone)


def test_a_sweep_runs_every_combination_in_order(command: Any) -> None:
    words = ("--sweep", "adjustment_interval=5,10", "--sweep", "sim.max-num-seqs=1,256", "--json", "--jobs", "1")
    _, out, _ = command(*SMALL, *words)
    rows = json.loads(out)
    names = [f"adjustment_interval={a}, max-num-seqs={b}" for a in (5, 10) for b in (1, 256)]
    assert [row["name"] for row in rows] == names
    assert rows[0]["ttft_ms"]["mean"] > rows[1]["ttft_ms"]["mean"]


def test_runs_at_once_give_what_runs_in_turn_give(command: Any) -> None:
    words = (*SMALL, "--static", "1,1", "--static", "0,2", "--json")
    _, in_turn, _ = command(*words, "--jobs", "1")
    assert elsewhere(*words, "--jobs", "2") == in_turn


@pytest.mark.parametrize(
    "more", [("--json",), *(pytest.param(m, marks=pytest.mark.full) for m in ((), ("--router", "random", "--json")))]
)
def test_the_same_command_prints_the_same_bytes(more: tuple[str, ...], command: Any) -> None:
    words = (*SMALL, "--static", "2,2", "--seed", "7", *more)
    code, out, _ = command(*words)
    assert code == 0
    assert elsewhere(*words) == out


def test_another_seed_gives_the_random_router_other_choices(command: Any) -> None:
    words = (*SMALL, "--static", "0,4", "--router", "random", "--json")
    assert command(*words, "--seed", "1") != command(*words, "--seed", "2")


@pytest.mark.parametrize(
    ("given", "dispatch", "router"),
    [
        ({}, "threshold", "least-loaded"),
        ({"itl_ms": 25.0}, "slo", "slo"),
        ({"ttft_ms": 200.0, "always_remote": True}, "threshold", "slo"),
        ({"ttft_ms": 200.0, "disagg_policy": "threshold", "router": "random"}, "threshold", "random"),
    ],
)
def test_dispatch_and_router_default_as_those_of_serve(given: dict[str, Any], dispatch: str, router: str) -> None:
    words = {"ttft_ms": None, "itl_ms": None, "always_remote": False, "disagg_policy": None, "router": None, **given}
    found = with_defaults(words)
    assert (found["disagg_policy"], found["router"]) == (dispatch, router)


def test_targets_of_the_planner_are_those_of_the_run() -> None:
    words = {"ttft_ms": None, "itl_ms": 10.0, "overrides": ("--planner.ttft=200", "--planner.itl-ms=10")}
    found = with_planner_targets(words)
    assert (found["ttft_ms"], found["itl_ms"]) == (200, 10)
    with pytest.raises(BadInput, match=r"--itl is 20, and --planner.itl_ms is 10"):
        with_planner_targets({**words, "itl_ms": 20.0})


@pytest.mark.full
def test_the_page_is_self_contained_and_the_same_every_time(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages = []
    for name in ("one.html", "two.html"):
        code, _, _ = command(*SMALL, "--initial", "1,1", "--ttft", "200", "--report", str(tmp_path / name))
        assert code == 0
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert "<svg" in pages[0]
    assert "planner from 1P1D" in pages[0]
    assert "<script" not in pages[0]
    assert 'src="http' not in pages[0]
    assert "<link" not in pages[0]


def test_a_report_without_matplotlib_is_refused_before_the_run(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Exception, match=r"\.\[report\]"):
        check_plots()
    code, _, error = command("--trace", "nowhere", "--report", "page.html")
    assert code == 2
    assert "pip install '.[report]'" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--planner.adjustment-intervall=10",), "adjustment-interval"),
        (("--planner.adjustment-interval=-1",), "adjustment_interval: must be greater"),
        (("--planner.max-gpu-budget=0",), "max_gpu_budget: must be greater"),
        (("--planner.decode-kv-scale-up-threshold=0.2",), "must be below"),
        (("--sim.max-num-seq=4",), "max-num-seqs"),
        (("--sim.max-num-seqs=0",), "max_num_seqs"),
        (("--treshold=4",), "unknown option '--treshold=4'"),
        (("--sweep", "adjustment-interval"), "is no KEY=A,B"),
        (("--sweep", "adjustment=1,2"), "is no option of the planner"),
        (("--sweep", "Host.gpus=1,2"), "one of the planner's"),
        (("--static", "2"), "is no P,D"),
        (("--static", "2,0"), "is no P,D"),
        (("--initial", "8,8"), "needs 16 GPUs"),
        (("--gpus", "0,1"), "simulated GPUs only"),
        (("--gpus", "sim:0"), "simulated GPUs only"),
        (("--profile", "nowhere"), "there is no engine profile 'nowhere'"),
        (("--ttft", "-1"), "--ttft"),
        (("stray",), "stray"),
    ],
)
def test_bad_words_are_named_without_a_traceback(words: tuple[str, ...], told: str, command: Any) -> None:
    code, _, error = command(*SMALL, *words)
    assert code == 2
    assert told in error
    assert "Traceback" not in error


def test_a_bad_trace_names_file_line_and_field(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 0, "input_length": 5}\n')
    code, _, error = command("--trace", str(path))
    assert code == 2
    assert f"{path}, line 2: output_length is missing" in error


def test_a_generated_trace_is_kept_and_replayed(command: Any, tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz", tmp_path / "plain.jsonl"]
    words = ("--trace-speed", "2", "--static", "1,1", "--json")
    made = [command("--generate", "chat,duration=20,seed=3", "-o", str(file), *words) for file in files]
    replayed = [command("--trace", str(file), *words) for file in files]
    assert made[0][0] == 0
    assert json.loads(made[0][1])["requests"] > 20
    assert {out for _, out, _ in [*made, *replayed]} == {made[0][1]}
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files)


def test_the_limit_is_in_the_file_and_the_speed_is_not(command: Any, tmp_path: Path) -> None:
    """Else a replay with the same options would apply the speed twice."""
    file = tmp_path / "trace.jsonl"
    command("--generate", "sin", "--limit", "7", "--trace-speed", "3", "-o", str(file), "--json")
    assert read_trace(file) == list(islice(generate(parse_generated("sin").options), 7))


def test_the_table_names_what_was_generated(command: Any) -> None:
    _, out, _ = command("--generate", "sin,seed=4,rate=12.5", "--limit", "60", "--static", "1,1")
    assert out.startswith("generated: sin,seed=4; ")
    _, out, _ = command(*SMALL, "--static", "1,1")
    assert out.startswith("trace: sin_5-20.jsonl.gz; ")


def test_the_example_trace_is_the_generators() -> None:
    assert read_trace(TRACE) == list(generate(parse_generated("sin,duration=150").options))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "neither is given"),
        (("--generate", "sin", "--trace", str(TRACE)), "both are given"),
        (("--trace", str(TRACE), "-o", "kept.jsonl"), "--write-trace kept.jsonl keeps what --generate made"),
        (("--generate", "sinus"), "did you mean 'sin'?"),
        (("--generate", "sin,rate=0"), "--generate: rate: must be greater than 0"),
        (("--generate", "sin", "--limit", "2", "-o", "no/such/folder/t.jsonl"), "cannot be written"),
    ],
)
def test_what_cannot_be_generated_is_told_without_a_traceback(
    words: tuple[str, ...], told: str, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = command(*words)
    assert code == 2
    assert told in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_options_take_dash_and_underscore(command: Any) -> None:
    one = command(*SMALL, "--planner.adjustment-interval=10", "--planner.max-gpu-budget=4", "--json")
    other = command(*SMALL, "--planner.adjustment_interval", "10", "--planner.max_gpu_budget=4", "--json")
    assert one == other
    assert one[0] == 0


def test_no_operation_decides_and_changes_nothing(command: Any) -> None:
    words = ("--trace", str(TRACE), "--limit", "400", "--initial", "2,2", "--planner.adjustment-interval=5", "--json")
    _, acts, _ = command(*words)
    _, looks, _ = command(*words, "--planner.no-operation")
    assert json.loads(acts)["scale_actions"] > 0
    assert json.loads(looks)["scale_actions"] == 0
    assert json.loads(looks)["gpus_mean"] == 4.0


@pytest.mark.full
def test_several_policies_stand_side_by_side(command: Any) -> None:
    words = (
        *SMALL,
        "--ttft",
        "300",
        "--itl",
        "20",
        "--policy",
        "load,sla,throughput-load",
        "--static",
        "3,3",
        "--json",
    )
    code, out, err = command(*words, "--planner.max-gpu-budget=6", "--planner.prefill-queue-scale-up-threshold=1")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    names = ["load from 1P1D", "sla from 1P1D", "throughput-load from 1P1D", "static 3P3D"]
    assert [row["name"] for row in rows] == names
    assert [row["completed"] for row in rows] == [60] * 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--policy", "slaa"), "'slaa' is none.*did you mean 'sla'"),
        (("--policy", "sla", "--planner.prefill-queue-scale-up-threshold=1"), "no option of sla"),
        (("--planner.policy=load", "--planner.ttft=3"), "ttft.*load"),
    ],
)
def test_a_policy_without_that_option_is_named(command: Any, words: tuple[str, ...], told: str) -> None:
    code, _, err = command(*SMALL, *words)
    assert code == 2
    assert re.search(told, " ".join(err.split()))
