"""`dynamo serve --model …` and `dynamo serve -- COMMAND` on real graphs: from one line to an answer."""

from __future__ import annotations

import httpx
import pytest

from tests.drivers.http_graphs import SERVER
from tests.drivers.models import ask
from tests.drivers.served import Served

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

TWO = ("--model", "sim-tiny", "--model", "sim-tiny", "--served-model-name", "a", "--served-model-name", "b")


def test_two_models_are_served_behind_one_port() -> None:
    with Served(target=TWO).started() as served:
        listed = httpx.get(f"{served.url}/v1/models", timeout=30.0).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]
        answers = [ask(served, model).json() for model in ("a", "b")]
        assert [(one["model"], one["usage"]["completion_tokens"]) for one in answers] == [("a", 4), ("b", 4)]
        unknown = ask(served, "c")
        assert unknown.status_code == 404
        assert "served now: `a`, `b`" in unknown.json()["error"]["message"]
        served.ok("scale", "b", "+1", "--wait", "--json")
        assert {"b", "b_1"} <= served.states().keys()


@pytest.mark.full
def test_a_killed_arbiters_model_is_taken_back_and_its_plan_applied() -> None:
    words = ("--model", "sim-tiny", "--write", "plan.yaml")
    with Served("--on-arbiter-death", "keep", target=words, files={"empty": ""}).started() as served:
        before = served.pids()
        served.kill_arbiter()
        served.adopt()
        assert served.pids() == before
        # The override of the port is the command line's, and is said again.
        assert "nothing differs" in served.ok("apply", "-f", "plan.yaml", "--Frontend.port=0")


@pytest.mark.full
def test_a_servers_own_line_is_a_component_that_is_started_again() -> None:
    line = ("python", str(SERVER), "--model", "foo", "--port", "8123")
    with Served(target=("--port", "0"), frontend=False, behind=line).started() as served:
        assert ask(served, "foo").json()["choices"][0]["message"]["content"].startswith("0 1 2 3")
        served.ok("restart", "Server", "--wait")
        assert ask(served, "foo").status_code == 200
