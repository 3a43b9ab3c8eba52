"""`dynamo profile` notices what is wrong with GPUs and engines: in the terminal, the file and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drivers.served import AGG, Served

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(400)]

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
