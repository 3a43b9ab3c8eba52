"""A planner outlives its arbiter: the run that is adopted goes on with its state and its options."""

from __future__ import annotations

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT
from tests.drivers.planned import planner
from tests.tools.alone import alone

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


@pytest.mark.full
def test_the_planner_of_an_adopted_run_goes_on_as_it_was() -> None:
    with alone("--on-arbiter-death", "keep") as served:
        served.start()
        assert planner(served, "status")["state"] == "stopped"
        planner(served, "start", options={"max_gpu_budget": 6})
        planner(served, "set", options={"adjustment_interval": 7})
        planner(served, "pause")

        served.kill_arbiter()
        served.adopt()
        status = planner(served, "status")
        assert status["state"] == "paused"
        assert (status["options"]["max_gpu_budget"], status["options"]["adjustment_interval"]) == (6, 7.0)
        planner(served, "resume")
        assert served.statefile()["planner"]["state"] == "running"

        served.kill_arbiter()
        served.adopt()
        assert planner(served, "status")["state"] == "running"

        served.kill_arbiter()
        served.adopt("--no-planner")
        assert planner(served, "status")["state"] == "stopped"
        assert served.statefile()["planner"]["state"] == "stopped"


def test_a_planner_for_a_graph_without_a_decode_worker_is_refused_before_anything_starts() -> None:
    with alone("--planner", name="Alone") as served:
        done = served.cli(*served.serve_words("--detach"))
    assert done.returncode == EXIT_BAD_INPUT
    assert "Planner: it scales a graph with one decode (or aggregated) component; it has none" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
