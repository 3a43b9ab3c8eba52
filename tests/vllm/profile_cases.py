"""Real vLLM measured by `dynamo profile`, and the profile used by the simulator, by `dynamo plan` and by `slo`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from dynamo_local.profile.judgement import PASSES_MIN
from dynamo_local.profile.reading import read_profile
from tests.drivers.planned import DECODE, PREFILL, planner
from tests.drivers.served import Served, auntil
from tests.vllm.hosts import VllmHost
from tests.vllm.planned_cases import BUDGET, ITL_MS, TARGET, TTFT_MS, arrivals, play

WHOLE, WHOLE_S = "8m", 900.0
"""The budget of a whole profile, and the quarter of an hour that it must take at most: on two cores that do something
else, too, what was begun ends late."""
SMALL = ("--small", "--budget", "100s", "--no-actions")
LENGTHS_MIN, LOADS_MIN = 16, 15
"""Prompts and decode passes in a whole profile of an engine with 4,096 tokens of context."""
ANSWER = 64
FEW, MANY = 2, 16


def too_much_for(few: dict[str, Any]) -> tuple[str, ...]:
    """A load of half as much again as `FEW` sequences at once can decode on this host, as it was measured."""
    pass_ms = min(
        each["mean_ms"] for each in few["points"] if each["kind"] == "decode" and each["requests"] > FEW - 0.5
    )
    rate = 1.5 * FEW * 1000 / (pass_ms * ANSWER)
    return ("--rate", f"{rate:.1f}", "--isl", "100", "--osl", str(ANSWER), "--spread", "0.2")


def profiled(served: Served, graph: str, file: Path, folder: Path, *words: str) -> dict[str, Any]:
    done = served.ok(
        *("profile", f"graphs.{graph}:Frontend", "-f", str(file), "-o", str(folder), "-n", served.namespace),
        *("--json", *words),
        timeout_s=2 * WHOLE_S,
    )
    document: dict[str, Any] = json.loads(done)
    print(f"{graph}: {document['seconds']} s, load {os.getloadavg()[0]:.1f}\n{json.dumps(document['certificate'])}")
    return document


def check_whole(document: dict[str, Any], folder: Path, *, simulated: bool) -> None:
    """All that a profile has, or null where nobody can know it; and our reader takes the arrays."""
    assert document["seconds"] <= WHOLE_S
    kinds = [point["kind"] for point in document["points"]]
    assert kinds.count("prefill") >= LENGTHS_MIN, kinds
    assert kinds.count("decode") >= LOADS_MIN, kinds
    assert "cached" not in kinds  # these engines keep no prefix cache
    assert {role: engine["engine"] for role, engine in document["engines"].items()} == {
        "prefill": "vllm",
        "decode": "vllm",
    }
    certificate = document["certificate"]
    assert (certificate["state"] == "certified") == (not certificate["where"]), certificate
    if certificate["trace"]:
        assert [row["what"] for row in certificate["trace"]] == ["TTFT p50", "TTFT p90", "ITL p50", "ITL p90"]
    else:  # a busy host lost requests of the trace: then that is said
        assert any(where.startswith("trace: ") for where in certificate["where"]), certificate
    for component in (PREFILL, DECODE):
        assert document["actions"][component]["cold"] > 0
        ready = document["memory"][component]["ready"]
        assert ready["host_bytes"] > 2**28
        assert (ready["vram_bytes"] is None) == simulated, ready
    assert (document["driver"] is None) == simulated
    assert any("GPUs are simulated" in text for text in document["noticed"]) == simulated
    read = read_profile(str(folder))
    assert read.decode.max_kv_tokens == document["engines"]["decode"]["max_kv_tokens"]
    assert len(read.prefill.isl) == kinds.count("prefill")


async def check_served(vllm_host: VllmHost, tmp_path: Path, folder: Path, state: str) -> None:
    """`slo` takes the profile for these engines, serves a load by it, and says how far they are off it."""
    section = {
        "policy": "slo",
        "profile-results-dir": str(folder),
        "ttft": TTFT_MS,
        "itl": ITL_MS,
        "target": TARGET,
        "budget": BUDGET,
    }
    with vllm_host.disaggregated(tmp_path, planner=section).started() as served:
        found = await play(served)
        assert found.failed == []
        assert len(found.within) == len(arrivals())

        def decode() -> list[dict[str, Any]]:
            rows = planner(served, "status")["drift"]
            return [row for row in rows if (row["component"], row["kind"]) == (DECODE, "decode")]

        [row] = await auntil(decode, 60.0, what=lambda: planner(served, "status"))
        status, said = planner(served, "status"), served.cli("planner", "status").stdout
    assert row["passes"] >= PASSES_MIN
    assert status["profile"] == {"name": str(folder), "measured": True, "certificate": state}
    assert f"profile   {folder} ({state})" in said
    assert f"drift     {DECODE} decode: " in said
    print(said)


class Profiled:
    """`dynamo profile`."""

    async def test_a_whole_profile_in_a_quarter_of_an_hour_is_used_by_the_twin_and_by_slo(
        self, vllm_host: VllmHost, tmp_path: Path
    ) -> None:
        folder = tmp_path / "profile"
        with vllm_host.disaggregated(tmp_path) as served:
            words = ("disagg", tmp_path / "disagg.yaml", folder, "--budget", WHOLE)
            document = await asyncio.to_thread(profiled, served, *words)
            check_whole(document, folder, simulated=vllm_host.gpus.startswith("sim"))
            done = served.ok(
                *("simulate", "--profile", str(folder), "--static", "1,1", "--always-remote"),
                *("--generate", "chat,duration=60,rate=1,isl=200,osl=32,isl-max=1000,osl-max=100"),
                *("--ttft", str(10 * TTFT_MS), "--itl", str(10 * ITL_MS), "--json"),
            )
            played = json.loads(done)
            assert played["completed"] == played["requests"] > 0
        await check_served(vllm_host, tmp_path, folder, document["certificate"]["state"])

    async def test_of_two_settings_that_were_measured_the_better_one_is_named(
        self, vllm_host: VllmHost, tmp_path: Path
    ) -> None:
        folders = {seqs: tmp_path / f"profile-{seqs}" for seqs in (FEW, MANY)}
        documents = {}
        with vllm_host.aggregated(tmp_path) as served:
            for seqs, folder in folders.items():
                words = ("agg", tmp_path / "agg.yaml", folder, *SMALL, f"--VllmWorker.max-num-seqs={seqs}")
                documents[seqs] = document = await asyncio.to_thread(profiled, served, *words)
                assert document["engines"]["agg"]["max_num_seqs"] == seqs
            profiles = [word for folder in folders.values() for word in ("--profile", str(folder))]
            load = too_much_for(documents[FEW])
            done = served.cli("plan", *profiles, *load, "--ttft", "2000", "--itl", "200", "--json", timeout_s=300.0)
        assert done.returncode == 0, done.stdout + done.stderr
        planned = json.loads(done.stdout)
        print({each["profile"]: (each["gpus"], each["attainment"]) for each in planned["profiles"]}, planned["yaml"])
        assert planned["profile"] == str(folders[MANY])
        assert f"max-num-seqs: {MANY}" in planned["yaml"]
        gpus = {each["profile"]: each["gpus"] for each in planned["profiles"]}
        assert gpus[str(folders[MANY])] <= gpus[str(folders[FEW])]

    async def test_equal_engines_measure_every_point(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        with vllm_host.aggregated(tmp_path, ServiceArgs={"workers": 2}) as served:
            words = ("agg", tmp_path / "agg.yaml", tmp_path / "profile", *SMALL)
            document = await asyncio.to_thread(profiled, served, *words)
        names = {f"{served.namespace}_{DECODE}", f"{served.namespace}_{DECODE}_1"}
        assert all(set(point["workers"]) == names for point in document["points"])
        assert len({gpu["uuid"] for gpu in document["gpus"]}) == 2
        in_turn = any("one after the other" in text for text in document["noticed"])
        assert in_turn == vllm_host.gpus.startswith("sim")
