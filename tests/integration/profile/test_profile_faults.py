"""What is wrong with the GPUs while they are profiled: found in the points, and said in the terminal, the file and the
report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drivers.served import AGG, Served

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(400)]


def profiled(folder: Path, *words: str) -> tuple[list[str], str, str]:
    """What was noticed, as the file has it; the terminal's words; and the report."""
    with Served(target=AGG, namespace="profile") as served:
        done = served.cli(
            *("profile", *AGG, "--Common.sim.speed=10", "-o", str(folder)),
            *("--small", "--budget", "75s", "--no-actions", "--gpus", "sim:2"),
            *("--report", str(folder / "report.html"), *words),
            timeout_s=300.0,
        )
    assert done.returncode == 0, done.stderr
    noticed = json.loads((folder / "profile.json").read_text())["noticed"]
    return noticed, done.stdout, (folder / "report.html").read_text()


def told(noticed: list[str], words: str) -> str:
    """The sentence with these words, of which there is one."""
    found = [text for text in noticed if words in text]
    assert len(found) == 1, noticed
    return found[0]


def test_a_slow_gpu_is_found_and_named(tmp_path: Path) -> None:
    slower = ("--Common.sim.slow_gpu=1", "--Common.sim.slow_factor=1.3", "--VllmWorker.ServiceArgs.workers=2")
    noticed, said, report = profiled(tmp_path / "out", *slower)
    text = told(noticed, "times what its equals take")
    assert text.startswith(("profile_VllmWorker_1 takes 1.2", "profile_VllmWorker_1 takes 1.3"))
    assert "_VllmWorker_1 takes 1." in said
    assert "_VllmWorker_1 takes 1." in report


def test_a_neighbour_that_comes_now_and_then_is_noticed(tmp_path: Path) -> None:
    neighbour = ("--Common.sim.neighbour_every_s=1", "--Common.sim.neighbour_for_s=0.2")
    noticed, said, report = profiled(tmp_path / "out", *neighbour)
    told(noticed, "something else uses the GPU")
    assert "something else uses the GPU" in said
    assert "something else uses the GPU" in report


def test_an_engine_that_becomes_slower_is_noticed(tmp_path: Path) -> None:
    noticed, said, report = profiled(tmp_path / "out", "--Common.sim.drift_per_s=0.01")
    told(noticed, "slower while it was measured")
    assert "slower while it was measured" in said
    assert "slower while it was measured" in report
