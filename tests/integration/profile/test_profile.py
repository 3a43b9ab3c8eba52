"""`dynamo profile` as a user runs it: simulated engines whose truth is known, HTTP servers, faults, and later drift."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.judgement import PASSES_MIN
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile
from dynamo_local.system.processes import is_alive
from tests.drivers.http_graphs import http_graph, section
from tests.drivers.planned import DECODE, open_loop, planner, steady
from tests.drivers.served import AGG, DISAGG, Served, auntil, until
from tests.fakes.profile_folders import slow_engine

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(400)]

SPEED = 10
TRUTH = ProfileModel.load(DEFAULT_PROFILE)
NAMESPACE = "profile"


def command_line(target: tuple[str, ...], folder: Path, *more: str) -> tuple[str, ...]:
    return ("profile", *target, f"--Common.sim.speed={SPEED}", "-o", str(folder), *more)


def check_points(document: dict[str, Any]) -> None:
    """Every point within 3 % of what the engine plays, at what it really computed."""
    for point in document["points"]:
        kv, requests = point["kv_tokens"], point["requests"]
        if point["kind"] in ("decode", "mixed"):
            truth_s = TRUTH.itl_s(round(kv), kv / requests)
            truth_s += TRUTH.launch_s + TRUTH.prefill_s(0, point["chunk"]) if point["chunk"] else 0.0
        else:
            truth_s = TRUTH.launch_s + TRUTH.prefill_s(round(kv), point["tokens"] - round(kv))
        assert point["mean_ms"] == pytest.approx(truth_s * 1000 / SPEED, rel=0.03), point


@pytest.mark.timing
def test_a_small_profile_of_an_aggregated_graph(tmp_path: Path) -> None:
    with Served(target=AGG, namespace=NAMESPACE) as served:
        folder = tmp_path / "out"
        done = served.ok(
            *command_line(AGG, folder, "--small", "--budget", "30s", "--no-actions", "--json"), timeout_s=170.0
        )
        document = json.loads(done)
        check_points(document)
        assert set(document["engines"]) == {"agg"}
        assert document["certificate"]["state"] in ("certified", "uncertified")
        assert document["certificate"]["trace"], document["certificate"]
        assert read_profile(str(folder)).decode.max_kv_tokens == document["engines"]["agg"]["max_kv_tokens"]
        policy = ("--Planner.policy=throughput-load", "--Planner.optimization-target=sla")
        planner = ("--planner", *policy, f"--Planner.profile-results-dir={folder}")
        served.ok("serve", *AGG, f"--Common.sim.speed={SPEED}", *planner, "--dry-run")
        other = served.cli("serve", *AGG, *planner, "--dry-run")
        assert other.returncode == 2
        assert "sim.speed is 1.0 here and was 10.0" in other.stderr
        assert "profile-anyway" in other.stderr
        served.ok("serve", *AGG, *planner, "--Planner.profile-anyway=true", "--dry-run")


@pytest.mark.timeout(900)
def test_a_whole_profile_is_right_everywhere_in_three_minutes(tmp_path: Path) -> None:
    with Served(target=DISAGG, namespace=NAMESPACE) as served:
        folder = tmp_path / "out"
        done = served.ok(*command_line(DISAGG, folder, "--budget", "4m", "--json"), timeout_s=800.0)
        document = json.loads(done)
        check_points(document)
        kinds = [point["kind"] for point in document["points"]]
        assert (kinds.count("prefill") >= 16, kinds.count("decode") >= 30) == (True, True)
        kept = json.loads((folder / "measuring.json").read_text())
        assert kept["elapsed_s"] < 180.0
        assert {"cold", "drain"} <= document["actions"]["VllmWorker"].keys()
        assert {"cold", "drain"} <= document["actions"]["PrefillWorker"].keys()
        planned = served.ok(
            *("plan", "--profile", str(folder), "--rate", "20", "--isl", "1000", "--osl", "50"),
            *("--ttft", "100", "--itl", "10", "--json"),
            timeout_s=300.0,
        )
        assert json.loads(planned)["attained"]


@pytest.mark.timing
@pytest.mark.timeout(600)
def test_ctrl_c_keeps_what_is_there_and_resume_goes_on(tmp_path: Path) -> None:
    with Served(target=AGG, namespace=NAMESPACE) as served:
        folder = tmp_path / "out"
        process = served.popen(*command_line(AGG, folder, "--budget", "60s", "--no-actions"))
        until(lambda: (folder / "measuring.json").exists(), 170.0, what=served.foreground_output)
        process.send_signal(signal.SIGINT)
        assert process.wait(120.0) == 130, served.foreground_output()
        assert "--resume goes on" in served.foreground_output()
        assert not is_alive(process.pid)
        before = json.loads((folder / "measuring.json").read_text())
        done = served.ok(
            *command_line(AGG, folder, "--budget", "90s", "--no-actions", "--resume", "--json"), timeout_s=400.0
        )
        check_points(json.loads(done))
        after = json.loads((folder / "measuring.json").read_text())
        by_point = {(p["kind"], p["tokens"], p["requests"]): p["samples"] for p in after["points"]}
        for point in before["points"]:
            samples = by_point[point["kind"], point["tokens"], point["requests"]]
            assert samples[: len(point["samples"])] == point["samples"]


TOKEN_S, SEQ_S, PREFILL_S, PROMPT_TOKEN_S = 0.02, 0.002, 0.05, 1e-4
SERVER = (
    *("--token-s", str(TOKEN_S), "--seq-s", str(SEQ_S), "--prefill-s", str(PREFILL_S)),
    *("--prompt-token-s", str(PROMPT_TOKEN_S), "--block-size", "16"),
)
HTTP = ("profile", "-f", "deployment.yaml", "--namespace", "dynamo", "--no-actions", "--json", "-o", "out")
OVERHEAD_MS = 30.0
"""HTTP and timers add so much to a repetition, on a machine that does something else."""


@pytest.mark.timing
def test_servers_are_measured_from_outside_at_their_own_port() -> None:
    with http_graph(Vllm=section("aggregated", 2, *SERVER)) as served:
        done = served.ok(*HTTP, "--small", "--budget", "60s", "--max-num-seqs", "8", timeout_s=300.0)
        document = json.loads(done)
        engine = document["engines"]["agg"]
        assert (engine["engine"], engine["max_kv_tokens"], engine["context_length"]) == ("http", 16_000, 4096)
        assert engine["max_num_seqs"] == 8
        assert "openai_server.py" in engine["options"]["command"]
        for point in document["points"]:
            assert point["over"] == "http"
            assert set(point["workers"]) == {"dynamo_Vllm", "dynamo_Vllm_1"}
            if point["kind"] == "decode":
                truth_ms = 1000 * (TOKEN_S + SEQ_S * point["requests"])
            else:
                truth_ms = 1000 * (PREFILL_S + TOKEN_S + SEQ_S + PROMPT_TOKEN_S * (point["tokens"] - point["cached"]))
            assert truth_ms - 1.0 <= point["mean_ms"] <= truth_ms * 1.1 + OVERHEAD_MS, point
        assert {point["kind"] for point in document["points"]} == {"prefill", "cached", "decode"}
        assert document["certificate"]["trace"], document["certificate"]
        assert read_profile(str(served.cwd / "out")).decode.max_kv_tokens == 16_000


def test_what_a_server_does_not_say_is_asked_for_by_its_option() -> None:
    with http_graph(Vllm=section("aggregated", 1)) as served:
        done = served.cli(*HTTP, timeout_s=200.0)
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert "dynamo_Vllm does not say how many tokens its KV cache holds" in done.stderr
        assert "--kv-tokens N and --max-num-seqs N" in done.stderr


SLOW_GPU = ("--Common.sim.slow_gpu=1", "--Common.sim.slow_factor=1.3", "--VllmWorker.ServiceArgs.workers=2")
NEIGHBOUR = ("--Common.sim.neighbour_every_s=1", "--Common.sim.neighbour_for_s=0.2")


@pytest.mark.parametrize(
    ("words", "noticed", "shown"),
    [
        (SLOW_GPU, "times what its equals take", "_VllmWorker_1 takes 1."),
        (NEIGHBOUR, "something else uses the GPU", "something else uses the GPU"),
        (("--Common.sim.drift_per_s=0.01",), "slower while it was measured", "slower while it was measured"),
    ],
    ids=["slow GPU", "neighbour", "slower and slower"],
)
def test_what_is_wrong_is_noticed(words: tuple[str, ...], noticed: str, shown: str, tmp_path: Path) -> None:
    with Served(target=AGG, namespace="profile") as served:
        done = served.cli(
            *("profile", *AGG, "--Common.sim.speed=10", "-o", str(tmp_path)),
            *("--small", "--budget", "75s", "--no-actions", "--gpus", "sim:2"),
            *("--report", str(tmp_path / "report.html"), *words),
            timeout_s=300.0,
        )
    assert done.returncode == 0, done.stderr
    texts = json.loads((tmp_path / "profile.json").read_text())["noticed"]
    found = [text for text in texts if noticed in text]
    assert len(found) == 1, texts
    assert words != SLOW_GPU or found[0].startswith(
        ("profile_VllmWorker_1 takes 1.2", "profile_VllmWorker_1 takes 1.3")
    )
    for place in (found[0], done.stdout, (tmp_path / "report.html").read_text()):
        assert shown in place


SLOWER = 1.25


async def test_engines_slower_than_their_profile_are_seen_in_the_status_the_metrics_and_a_note(tmp_path: Path) -> None:
    """Four fifths of the profiled speed: each decode pass and each prompt takes a quarter longer."""
    profile = slow_engine(tmp_path / "profile")
    words = (
        "--VllmWorker.conditional-disagg=false",
        f"--Common.sim.profile={profile}",
        f"--Common.sim.speed={1 / SLOWER}",
        *("--planner", "--Planner.policy=slo", f"--Planner.profile-results-dir={profile}"),
        *("--Planner.ttft=5000", "--Planner.itl=200", "--Planner.min-endpoint=1"),
    )
    with Served(*words).started() as served:
        answers = await open_loop(served, steady(rate=2.0, seconds=20.0, prompt_words=100, tokens=40))
        assert answers.wrong == []

        def decode() -> list[dict[str, object]]:
            rows = planner(served, "status")["drift"]
            return [row for row in rows if (row["component"], row["kind"]) == (DECODE, "decode")]

        [row] = await auntil(decode, 60.0, what=lambda: planner(served, "status"))
        assert row["passes"] >= PASSES_MIN
        assert row["p50"] == pytest.approx(SLOWER - 1, abs=0.08), row
        with urllib.request.urlopen(served.status()["metrics_url"], timeout=10.0) as answer:
            assert f'dynamo_planner_profile_drift_ratio{{component="{DECODE}",kind="decode"' in answer.read().decode()
        said = served.cli("planner", "status").stdout
        assert f"profile   {profile} (not measured by `dynamo profile`" in said
        assert f"drift     {DECODE} decode: +" in said
        notes = [note["text"] for note in served.status()["notes"] if "off their profile" in note["text"]]
        assert any(f"{DECODE} decode" in note for note in notes), notes
