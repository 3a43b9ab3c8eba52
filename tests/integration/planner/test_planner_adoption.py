"""A planner outlives its arbiter: the run that is adopted goes on with its state and its options."""

from __future__ import annotations

import os
import signal

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT
from dynamo_local.serve.processes import is_alive
from tests.fakes.alone import alone
from tests.fakes.planned import planner
from tests.fakes.served import Served, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


def adopt(served: Served, *words: str) -> None:
    """Kill the arbiter, and take its worker back."""
    old = served.status()["arbiter_pid"]
    os.kill(old, signal.SIGKILL)
    until(lambda: not is_alive(old))
    done = served.cli(*served.serve_words("--adopt", "--detach", *words), timeout_s=90.0)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_the_planner_of_an_adopted_run_goes_on_as_it_was() -> None:
    """Paused with another interval; then running; then as the command line says."""
    with alone("--on-arbiter-death", "keep") as served:
        served.start()
        assert planner(served, "status")["state"] == "stopped"
        planner(served, "start", options={"max_gpu_budget": 6})
        planner(served, "set", options={"adjustment_interval": 7})
        planner(served, "pause")

        adopt(served)
        status = planner(served, "status")
        assert status["state"] == "paused"
        assert (status["options"]["max_gpu_budget"], status["options"]["adjustment_interval"]) == (6, 7.0)
        planner(served, "resume")
        assert served.statefile()["planner"]["state"] == "running"

        adopt(served)
        assert planner(served, "status")["state"] == "running"

        adopt(served, "--no-planner")
        assert planner(served, "status")["state"] == "stopped"
        assert served.statefile()["planner"]["state"] == "stopped"


def test_a_planner_for_a_graph_without_a_decode_worker_is_refused_before_anything_starts() -> None:
    with alone("--planner", name="Alone") as served:
        done = served.cli(*served.serve_words("--detach"))
    assert done.returncode == EXIT_BAD_INPUT
    assert "Planner: it scales a graph with one decode (or aggregated) component; it has none" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
