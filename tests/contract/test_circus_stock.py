"""circus's own commands at our arbiter's endpoint: those that read work, and those that change become our commands.

The supervisor is a fake. Cases that are marked as missing describe `circus_plugins.stock` as issue 27 wants it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.drivers.circus_arbiter import WORKER, Commander, commanding

ASLEEP = "import time; time.sleep(60)"


@pytest.fixture
async def commander() -> AsyncIterator[Commander]:
    async with commanding() as commander:
        await commander.run(WORKER, ASLEEP)
        yield commander


async def test_numprocesses_counts_a_workers_process_and_all_of_them(commander: Commander) -> None:
    reply = await commander.ask("numprocesses", name=WORKER)
    assert (reply["status"], reply["numprocesses"]) == ("ok", 1)
    assert (await commander.ask("numprocesses"))["numprocesses"] == 1


async def test_options_are_those_of_the_watcher_with_masked_secrets(commander: Commander) -> None:
    reply = await commander.ask("options", name=WORKER)
    options = reply["options"]
    assert isinstance(options, dict)
    assert (options["singleton"], options["respawn"]) == (True, False)


async def test_stats_show_each_workers_process(commander: Commander) -> None:
    reply = await commander.ask("stats", name=WORKER)
    assert reply["status"] == "ok"
    (only,) = reply["info"].values()  # type: ignore[attr-defined]
    assert {"pid", "mem_info1", "cpu", "age"} <= set(only)


async def test_stats_without_a_name_show_all_workers(commander: Commander) -> None:
    reply = await commander.ask("stats")
    assert list(reply["infos"]) == [WORKER]  # type: ignore[call-overload]


async def test_dstats_show_the_arbiter(commander: Commander) -> None:
    reply = await commander.ask("dstats")
    assert reply["status"] == "ok"
    assert "pid" in reply["info"]  # type: ignore[operator]


@pytest.mark.parametrize(("command", "target"), [("incr", "+1"), ("decr", "-1")])
async def test_incr_and_decr_scale_the_workers_component(commander: Commander, command: str, target: str) -> None:
    reply = await commander.ask(command, name=WORKER)
    assert reply["status"] == "ok"
    (scale,) = commander.supervisor.commands
    assert (scale.component, str(scale.target), scale.force) == ("VllmWorker", target, False)
    assert scale.stimulus_id.startswith(f"circusctl-{command}:")


async def test_a_number_of_workers_that_is_none_is_refused(commander: Commander) -> None:
    reply = await commander.ask("incr", name=WORKER, nb=0)
    assert reply["status"] == "error"
    assert "a number from 1 on" in str(reply["reason"])
    assert commander.supervisor.commands == []


async def test_restart_is_our_graceful_restart(commander: Commander) -> None:
    reply = await commander.ask("restart", name=WORKER)
    assert reply["status"] == "ok"
    (restart,) = commander.supervisor.commands
    assert (restart.name, restart.force) == (WORKER, False)


async def test_a_restart_of_everything_is_refused(commander: Commander) -> None:
    reply = await commander.ask("restart")
    assert "`dynamo restart COMPONENT`" in str(reply["reason"])


@pytest.mark.parametrize("command", ["start", "kill", "set"])
async def test_a_refusal_is_one_sentence_that_names_the_command_to_use(commander: Commander, command: str) -> None:
    reply = await commander.ask(command, name=WORKER, options={})
    reason = str(reply["reason"])
    assert reply["status"] == "error"
    assert "`dynamo " in reason
    assert ". " not in reason
    assert commander.supervisor.commands == []
