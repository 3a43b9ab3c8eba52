"""Each planner command, as `dynamo planner` and circusctl send it, through a real circus arbiter."""

from __future__ import annotations

import json

import pytest

from dynamo_local.cli.common import ask_arbiter
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING
from tests.drivers.planned import decided, planner
from tests.drivers.served import until
from tests.tools.alone import alone

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

SLO = ("--policy=slo", "--ttft=500", "--itl=20")


@pytest.mark.full
def test_every_planner_command_reaches_the_planner_and_the_second_run_is_told_from_the_first() -> None:
    with alone() as served:
        served.start()
        first = served.status()["run_id"]

        def ask(*words: str) -> dict[str, object]:
            found: dict[str, object] = json.loads(served.ok("planner", *words, "--json"))
            return found

        assert ask("status")["state"] == "stopped"
        assert ask("start", *SLO)["state"] == "running"
        assert ask("pause")["state"] == "paused"
        assert ask("resume")["state"] == "running"
        options = ask("set", "max-gpu-budget=3")["options"]
        assert isinstance(options, dict)
        assert (options["policy"], options["max_gpu_budget"]) == ("slo", 3)
        until(lambda: decided(served), 30)
        assert ask("stop")["state"] == "stopped"
        history = ask_arbiter(served.paths, "dynamo_planner_history", 20.0, count=1)["decisions"]
        assert [each["run_id"] for each in history] == [first]
        (words,) = ask_arbiter(served.paths, "dynamo_planner_explain", 20.0, count=1)["words"]
        assert served.ok("planner", "explain").rstrip().endswith(words)
        assert json.loads(served.ok("planner", "plugins", "--json"))["plugins"] is not None
        refused = served.cli("planner", "pause")
        assert (refused.returncode, "the planner is stopped: nothing to pause" in refused.stderr) == (1, True)
        wrong = served.cli("planner", "set", "max-gpu-budget=many")
        assert (wrong.returncode, "Traceback" in wrong.stderr) == (EXIT_BAD_INPUT, False)
        served.down()

        served.start()
        assert served.status()["run_id"] != first
        none = served.cli("planner", "history")
        assert none.returncode == EXIT_NOT_RUNNING
        assert f"--run has those of {first}" in none.stderr
        assert json.loads(served.ok("planner", "history", "--run", first, "--json"))
        assert json.loads(served.ok("planner", "explain", "--run", "all", "--json"))
        assert planner(served, "status")["state"] == "stopped"
