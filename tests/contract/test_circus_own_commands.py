"""circus's commands, made safe, over the real endpoint of a real arbiter; only the supervisor is a fake."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.circus_plugins.stock import REFUSED
from dynamo_local.core.fleet.events import Drain
from dynamo_local.errors import EXIT_BAD_INPUT
from dynamo_local.system.processes import is_alive
from tests.drivers.circus_arbiter import WORKER, Commander, commanding

ASLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
async def commander() -> AsyncIterator[Commander]:
    async with commanding() as commander:
        yield commander


async def up(commander: Commander, name: str, code: str = ASLEEP) -> int:
    """Start a process that says when it is up, and wait for that; its pid."""
    pid = await commander.run(name, code)
    deadline_s = time.monotonic() + 10
    while not (commander.folder / f"{name}.log").read_text():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    return pid


@pytest.mark.parametrize("command", sorted(REFUSED))
async def test_a_refused_command_says_why_and_names_ours(commander: Commander, command: str) -> None:
    reply = await commander.ask(command, name=WORKER, options={}, cmd="sleep")
    assert (reply["status"], reply["code"], reply["exit_code"]) == ("error", "bad_input", EXIT_BAD_INPUT)
    assert str(reply["reason"]).startswith(f"`{command}` is refused: ")
    assert "`dynamo " in str(reply["reason"])
    assert (commander.supervisor.calls, commander.supervisor.commands) == ([], [])


async def test_stop_and_rm_are_a_drain_of_the_worker_as_we_spell_it(commander: Commander) -> None:
    """circus's `list` lower-cases names, and people paste these."""
    for command in ("stop", "rm"):
        reply = await commander.ask(command, name=WORKER.lower())
        assert (reply["status"], reply["watcher_name"], reply["state"]) == ("ok", WORKER, "draining")
    for drain, command in zip(commander.supervisor.commands, ("stop", "rm"), strict=True):
        assert drain == Drain(stimulus_id=drain.stimulus_id, name=WORKER)
        assert drain.stimulus_id.startswith(f"circusctl-{command}:")


async def test_a_stop_that_waits_is_answered_when_the_worker_is_gone(commander: Commander) -> None:
    stopping = asyncio.ensure_future(commander.ask("stop", name=WORKER, waiting=True))
    while not commander.supervisor.commands:
        await asyncio.sleep(0.005)
    assert (await commander.ask("dynamo_status"))["status"] == "ok"
    assert not stopping.done()
    del commander.supervisor.rows[WORKER]
    assert (await asyncio.wait_for(stopping, 5))["state"] == "exited"


async def test_quit_and_a_stop_without_a_name_are_a_down(commander: Commander) -> None:
    for command in ("quit", "stop"):
        assert (await commander.ask(command))["pid"] == 4711
    await commander.ask("quit", waiting=True)
    assert commander.supervisor.calls == [
        ("request_down", ("circusctl quit",), {"now": False}),
        ("request_down", ("circusctl stop",), {"now": False}),
        ("down", ("circusctl quit",), {}),
    ]


@pytest.mark.parametrize(
    ("command", "properties", "told"),
    [
        ("rm", {"name": WORKER, "nostop": True}, "keeps its GPUs"),
        ("stop", {"name": "dynamo_*"}, "not a pattern"),
        ("stop", {"name": "dynamo_etcd"}, "household"),
        ("signal", {"name": "dynamo_etcd", "signum": "USR2"}, "household"),
        ("signal", {"name": WORKER, "signum": "BOGUS"}, "'BOGUS' is no signal"),
        ("signal", {"name": WORKER, "signum": "TERM", "children": True}, "an engine's processes are its own"),
        ("signal", {"name": WORKER, "signum": "TERM", "recursive": True}, "an engine's processes are its own"),
        ("signal", {"name": WORKER, "signum": 10, "pid": 1}, "not 1"),
        ("signal", {"name": f"{WORKER}_1", "signum": "USR1"}, "not found"),
        ("signal", {"name": WORKER}, "None is no signal"),
    ],
)
async def test_what_would_harm_is_refused_in_words(
    commander: Commander, command: str, properties: dict[str, Any], told: str
) -> None:
    pid = await up(commander, WORKER)
    await commander.run("dynamo_etcd", ASLEEP)
    reply = await commander.ask(command, **properties)
    assert (reply["status"], reply["exit_code"]) == ("error", EXIT_BAD_INPUT)
    assert told in str(reply["reason"])
    assert (commander.supervisor.calls, commander.supervisor.commands) == ([], [])
    assert is_alive(pid)


async def test_a_signal_to_leave_is_a_drain(commander: Commander) -> None:
    pid = await up(commander, WORKER)
    for signum in ("TERM", signal.SIGINT, "15"):
        assert (await commander.ask("signal", name=WORKER.lower(), signum=signum))["state"] == "draining"
    assert [command.kind for command in commander.supervisor.commands] == ["Drain"] * 3
    assert is_alive(pid)


@pytest.mark.parametrize("signum", ["KILL", "STOP", "QUIT", "HUP", "ABRT", "USR1", "USR2", "RTMIN"])
async def test_a_signal_that_would_end_or_stop_a_worker_is_refused(commander: Commander, signum: str) -> None:
    pid = await up(commander, WORKER)
    reply = await commander.ask("signal", name=WORKER, signum=signum)
    assert reply["status"] == "error"
    assert f"`signal SIG{signum}` is refused" in str(reply["reason"])
    assert f"`dynamo drain {WORKER}`" in str(reply["reason"])
    assert is_alive(pid)


async def test_a_signal_that_the_worker_handles_reaches_it(commander: Commander) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *a: print('asked', flush=True))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(60)"
    )
    pid = await up(commander, WORKER, code)
    assert (await commander.ask("signal", name=WORKER, signum="CONT"))["signal"] == "SIGCONT"
    assert (await commander.ask("signal", name=WORKER, signum="usr1", pid=pid))["signal"] == "SIGUSR1"
    deadline_s = time.monotonic() + 5
    while "asked" not in (commander.folder / f"{WORKER}.log").read_text():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def test_get_masks_secrets(commander: Commander) -> None:
    await up(commander, WORKER)
    reply = await commander.ask("get", name=WORKER, keys=["env", "singleton"])
    assert reply["options"]["singleton"] is True
    assert "hush" not in json.dumps(reply)
    assert (await commander.ask("get", name=WORKER, keys=["nothing"]))["exit_code"] == EXIT_BAD_INPUT
