"""Our planner decides, and the shipped example of an environment acts: two processes that share nothing but etcd."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drivers.planned import decided, open_loop, planner, steady
from tests.drivers.scaled import events, names
from tests.drivers.served import ROOT, Served, auntil

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(240)]

D = "VllmWorker"
SCRIPT = ROOT / "examples" / "virtual_environment" / "environment.py"
WORDS = (
    "--planner",
    "--Planner.environment=virtual",
    "--Planner.backend=vllm",
    "--VllmWorker.conditional-disagg=false",
    "--VllmWorker.sim.speed=0.1",
    "--VllmWorker.sim.num-gpu-blocks=120",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    "--Planner.max-gpu-budget=3",
    "--Planner.decode-kv-scale-up-threshold=0.3",
    "--Planner.decode-kv-scale-down-threshold=0.1",
)


@contextmanager
def environment(served: Served, output: Path) -> Iterator[subprocess.Popen[str]]:
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**served.env, **served.environment()},
            cwd=served.cwd,
            stdout=file,
            stderr=file,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20.0)


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    """The shipped graph, 1P1D, whose planner acts on nothing itself."""
    with Served(*WORDS) as served:
        yield served.start()


def outcomes(served: Served) -> list[tuple[int, str, str]]:
    return [
        (reason["step"], record["outcomes"][reason["component"]]["outcome"], reason["component"])
        for record in decided(served)
        for reason in record["decision"]["reasons"]
        if reason["step"]
    ]


async def test_without_an_environment_it_holds_then_gives_up_and_says_so(graph: Served) -> None:
    planner(graph, "set", options={"virtual_max_wait": 4.0})
    answers = await open_loop(graph, steady(rate=4, seconds=16, prompt_words=8, tokens=150))
    assert answers.wrong == []
    status = planner(graph, "status")["virtual"]
    assert (status["decision_id"], status["num_decode_workers"], status["scaled_decision_id"]) == (0, 2, -1)
    steps = outcomes(graph)
    assert steps[0] == (1, "written", D)
    assert (1, "skipped", D) in steps
    assert names(graph, D) == [D], "it is not its own environment"
    assert any("decision 0 was not acknowledged within 4 s" in note["text"] for note in graph.status()["notes"])
    assert "No scaling needed (prefill=1, decode=2), skipping ETCD update" in graph.log("arbiter")
    assert "given up" in graph.cli("planner", "status").stdout


async def test_its_decisions_are_carried_out_by_the_environment_up_and_down(graph: Served, tmp_path: Path) -> None:
    planner(graph, "set", options={"virtual_max_wait": 1800.0})
    output = tmp_path / "environment.txt"
    with environment(graph, output):
        await auntil(lambda: len(names(graph, D)) == 2, 30.0, what=output.read_text)
        await auntil(lambda: len(names(graph, D)) == 1, 60.0, what=lambda: (outcomes(graph), output.read_text()))
        answers = await open_loop(graph, steady(rate=4, seconds=10, prompt_words=8, tokens=150))
        assert answers.wrong == []
        await auntil(lambda: len(names(graph, D)) == 1, 60.0, what=output.read_text)
        await auntil(lambda: not planner(graph, "status")["virtual"]["pending"], 30.0, what=output.read_text)
    lines = output.read_text().splitlines()
    assert lines[:2] == [f"decision 0 (prefill=1, decode=2): {what}" for what in ("begins", "done")]
    status = planner(graph, "status")["virtual"]
    assert status["scaled_decision_id"] == status["decision_id"] >= 1
    written = [step for step, outcome, component in outcomes(graph) if outcome == "written" and component == D]
    assert {1, -1} <= set(written)
    causes = {str(record["stimulus_id"]).partition(":")[0] for record in events(graph, f"{D}_1")}
    assert "scale" in causes
    assert "planner" not in causes
    assert "written" in graph.cli("planner", "history", "--changes").stdout
