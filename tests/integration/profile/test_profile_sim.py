"""`dynamo profile` as a user runs it: on a real graph of simulated engines, whose truth is a shipped profile."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile
from dynamo_local.system.processes import is_alive
from tests.drivers.served import AGG, DISAGG, Served, until

SPEED = 10
TRUTH = ProfileModel.load(DEFAULT_PROFILE)
NAMESPACE = "profile"


def words(target: tuple[str, ...], folder: Path, *more: str) -> tuple[str, ...]:
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


@pytest.mark.full
def test_a_small_profile_of_an_aggregated_graph(tmp_path):
    with Served(target=AGG, namespace=NAMESPACE) as served:
        folder = tmp_path / "out"
        done = served.cli(*words(AGG, folder, "--small", "--budget", "15s", "--no-actions", "--json"), timeout_s=170.0)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        check_points(document)
        assert set(document["engines"]) == {"agg"}
        assert document["certificate"]["state"] in ("certified", "uncertified")
        assert document["certificate"]["trace"], document["certificate"]
        assert read_profile(str(folder)).decode.max_kv_tokens == document["engines"]["agg"]["max_kv_tokens"]
        policy = ("--Planner.policy=throughput-load", "--Planner.optimization-target=sla")
        planner = ("--planner", *policy, f"--Planner.profile-results-dir={folder}")
        same = served.cli("serve", *AGG, f"--Common.sim.speed={SPEED}", *planner, "--dry-run")
        assert same.returncode == 0, same.stderr
        other = served.cli("serve", *AGG, *planner, "--dry-run")
        assert other.returncode == 2
        assert "sim.speed is 1.0 here and was 10.0" in other.stderr
        assert "profile-anyway" in other.stderr
        anyway = served.cli("serve", *AGG, *planner, "--Planner.profile-anyway=true", "--dry-run")
        assert anyway.returncode == 0, anyway.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_whole_profile_is_right_everywhere_in_three_minutes(tmp_path):
    with Served(target=DISAGG, namespace=NAMESPACE) as served:
        folder = tmp_path / "out"
        done = served.cli(*words(DISAGG, folder, "--budget", "4m", "--json"), timeout_s=800.0)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        check_points(document)
        kinds = [point["kind"] for point in document["points"]]
        assert (kinds.count("prefill") >= 16, kinds.count("decode") >= 30) == (True, True)
        kept = json.loads((folder / "measuring.json").read_text())
        assert kept["elapsed_s"] < 180.0
        assert {"cold", "drain"} <= document["actions"]["VllmWorker"].keys()
        assert {"cold", "drain"} <= document["actions"]["PrefillWorker"].keys()
        planned = served.cli(
            *("plan", "--profile", str(folder), "--rate", "20", "--isl", "1000", "--osl", "50"),
            *("--ttft", "100", "--itl", "10", "--json"),
            timeout_s=300.0,
        )
        assert planned.returncode == 0, planned.stderr
        assert json.loads(planned.stdout)["attained"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ctrl_c_keeps_what_is_there_and_resume_goes_on(tmp_path):
    with Served(target=AGG, namespace=NAMESPACE) as served:
        folder = tmp_path / "out"
        process = served.popen(*words(AGG, folder, "--budget", "60s", "--no-actions"))
        until(lambda: (folder / "measuring.json").exists(), 170.0, what=served.foreground_output)
        process.send_signal(signal.SIGINT)
        assert process.wait(120.0) == 130, served.foreground_output()
        assert "--resume goes on" in served.foreground_output()
        assert not is_alive(process.pid)
        before = json.loads((folder / "measuring.json").read_text())
        done = served.cli(*words(AGG, folder, "--budget", "90s", "--no-actions", "--resume", "--json"), timeout_s=400.0)
        assert done.returncode == 0, done.stderr
        check_points(json.loads(done.stdout))
        after = json.loads((folder / "measuring.json").read_text())
        by_point = {(p["kind"], p["tokens"], p["requests"]): p["samples"] for p in after["points"]}
        for point in before["points"]:
            samples = by_point[point["kind"], point["tokens"], point["requests"]]
            assert samples[: len(point["samples"])] == point["samples"]
