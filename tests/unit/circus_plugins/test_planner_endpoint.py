"""The planner's commands on the arbiter's endpoint: what they ask, how they answer, what circusctl's words become."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from circus.commands import get_commands
from circus.exc import ArgumentError

from dynamo_local.circus_plugins import planner_commands as commands
from dynamo_local.errors import EXIT_BAD_INPUT, ConfigError

STATUS = {"state": "running", "options": {}}


class FakePlanner:
    """Records what it is asked; answers with its status."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def planner(self) -> FakePlanner:
        """As the supervisor."""
        return self

    def status(self) -> dict[str, Any]:
        return STATUS

    async def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer("start", options)

    async def set(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer("set", options)

    async def stop(self) -> dict[str, Any]:
        return self._answer("stop", None)

    async def pause(self) -> dict[str, Any]:
        return self._answer("pause", None)

    async def resume(self) -> dict[str, Any]:
        return self._answer("resume", None)

    async def history(self, count: int) -> list[dict[str, Any]]:
        self._answer("history", count)
        return [{"seq": 1}]

    async def explain(self, count: int) -> list[str]:
        self._answer("explain", count)
        return ["VllmWorker holds"]

    def _answer(self, command: str, what: Any) -> dict[str, Any]:
        self.asked.append((command, what))
        if self.error is not None:
            raise self.error
        return STATUS


async def reply(planner: FakePlanner, command: Any, **props: Any) -> dict[str, Any]:
    """What the endpoint answers."""
    answered: dict[str, Any] = await command().execute(SimpleNamespace(supervisor=planner), props)
    return answered


async def test_each_command_reaches_the_planner_and_answers_with_its_status() -> None:
    planner = FakePlanner()
    for command in (
        commands.DynamoPlannerStop,
        commands.DynamoPlannerPause,
        commands.DynamoPlannerResume,
        commands.DynamoPlannerStatus,
    ):
        assert await reply(planner, command) == {"planner": STATUS}
    assert await reply(planner, commands.DynamoPlannerStart, options={"max_gpu_budget": 6}) == {"planner": STATUS}
    assert await reply(planner, commands.DynamoPlannerSet, options={"max_gpu_budget": 7}) == {"planner": STATUS}
    assert planner.asked == [
        ("stop", None),
        ("pause", None),
        ("resume", None),
        ("start", {"max_gpu_budget": 6}),
        ("set", {"max_gpu_budget": 7}),
    ]


async def test_history_and_explain_take_a_number() -> None:
    planner = FakePlanner()
    assert await reply(planner, commands.DynamoPlannerHistory) == {"decisions": [{"seq": 1}]}
    assert await reply(planner, commands.DynamoPlannerExplain, count=3) == {"words": ["VllmWorker holds"]}
    assert planner.asked == [("history", 20), ("explain", 3)]


@pytest.mark.parametrize("count", [0, -1, True, "3", 10_000, None])
async def test_a_number_that_is_none_is_refused(count: Any) -> None:
    answered = await reply(FakePlanner(), commands.DynamoPlannerExplain, count=count)
    assert (answered["status"], answered["exit_code"]) == ("error", EXIT_BAD_INPUT)
    assert "'count' must be a whole number" in answered["reason"]


@pytest.mark.parametrize("options", [["max_gpu_budget"], "max_gpu_budget=6", 3])
async def test_options_that_are_no_object_are_refused(options: Any) -> None:
    answered = await reply(FakePlanner(), commands.DynamoPlannerSet, options=options)
    assert answered["exit_code"] == EXIT_BAD_INPUT
    assert "'options' must be an object" in answered["reason"]


async def test_a_refusal_keeps_its_words_and_its_exit_code() -> None:
    planner = FakePlanner()
    planner.error = ConfigError("Planner: max_gpu_budget: must be 1 or more")
    answered = await reply(planner, commands.DynamoPlannerStart, options={"max_gpu_budget": 0})
    assert (answered["reason"], answered["exit_code"]) == ("Planner: max_gpu_budget: must be 1 or more", EXIT_BAD_INPUT)


def test_circusctls_words_are_settings() -> None:
    """`dynamo ctl dynamo_planner_set max-gpu-budget=6`."""
    message = commands.DynamoPlannerSet().message("max-gpu-budget=6", "no_operation=true")
    assert message["properties"]["options"] == {"max_gpu_budget": 6, "no_operation": True}
    assert commands.DynamoPlannerHistory().message("5")["properties"] == {"count": 5}
    assert commands.DynamoPlannerStop().message()["properties"] == {}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (commands.DynamoPlannerSet, ("max-gpu-budget",)),
        (commands.DynamoPlannerStart, ("frobnicate=1",)),
        (commands.DynamoPlannerStop, ("now",)),
        (commands.DynamoPlannerHistory, ("many",)),
        (commands.DynamoPlannerExplain, ("1", "2")),
    ],
)
def test_circusctls_words_that_make_no_sense_are_refused(command: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError):
        command().message(*words)


def test_circusctl_shows_the_answer_as_it_is() -> None:
    shown = commands.DynamoPlannerStatus().console_msg({"id": "1", "status": "ok", "time": 1.0, "planner": STATUS})
    assert json.loads(shown) == {"planner": STATUS}


def test_dynamo_ctl_and_every_host_know_the_planners_commands() -> None:
    """circus knows a command once its module is imported; `commands` is what they all import."""
    importlib.import_module("dynamo_local.circus_plugins.commands")
    names = {"start", "stop", "pause", "resume", "set", "status", "explain", "history"}
    assert {f"dynamo_planner_{name}" for name in names} <= set(get_commands())
