"""Our commands over the real endpoint of a real arbiter, and from the command line; only the supervisor is a fake."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dynamo_local.core.fleet.events import Change, Scale, VictimPolicy
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_NOT_RUNNING, BadInput, InfraUnavailable
from tests.drivers.circus_arbiter import WORKER, Commander, commanding
from tests.drivers.eventually import eventually


@pytest.fixture
async def commander() -> AsyncIterator[Commander]:
    async with commanding() as commander:
        yield commander


async def test_a_reply_carries_the_result_although_nobody_asked_to_wait(commander: Commander) -> None:
    """circus would answer a bare ok at once; the intent, and the id to find it again in the events, come instead."""
    reply = await commander.ask("dynamo_scale", component="VllmWorker", target="+1", victim_policy="coldest")
    assert reply["status"] == "ok"
    assert reply["instructions"] == [{"kind": "spawn", "watcher_name": "dynamo_VllmWorker_1"}]
    stimulus_id = reply["stimulus_id"]
    assert str(stimulus_id).startswith("scale:")
    target, policy = Change(1, relative=True), VictimPolicy.COLDEST
    expected = Scale(stimulus_id=str(stimulus_id), component="VllmWorker", target=target, victim_policy=policy)
    assert commander.supervisor.commands == [expected]


async def test_an_apply_reaches_the_supervisor(commander: Commander) -> None:
    reply = await commander.ask("dynamo_apply", deployment={"graph": {}}, dry_run=True)
    sent = commander.supervisor.commands[-1]
    assert (sent.deployment, sent.dry_run, sent.force) == ({"graph": {}}, True, False)
    assert reply["stimulus_id"] == sent.stimulus_id
    assert reply["stimulus_id"].startswith("apply:")


async def test_drain_and_restart_reach_the_supervisor(commander: Commander) -> None:
    await commander.ask("dynamo_drain", name=WORKER, cancel=True)
    await commander.ask("dynamo_restart", name="VllmWorker", rolling=True, force=True)
    drained, restarted = commander.supervisor.commands
    assert (drained.name, drained.cancel, drained.force) == (WORKER, True, False)
    assert (restarted.name, restarted.rolling, restarted.force) == ("VllmWorker", True, True)


async def test_an_option_that_says_no_turns_its_field_off(commander: Commander) -> None:
    await commander.ask("dynamo_scale", component="VllmWorker", target="+1", no_wake=True)
    assert [command.wake for command in commander.supervisor.commands] == [False]


@pytest.mark.parametrize("level", [2, "2"])
async def test_sleep_and_flips_reach_the_supervisor(commander: Commander, level: int | str) -> None:
    await commander.ask("dynamo_sleep", name=WORKER, level=level)
    await commander.ask("dynamo_wake", name=WORKER)
    await commander.ask("dynamo_flip", name=WORKER, cancel=True)
    await commander.ask("dynamo_scale_flip", gives="PrefillWorker", takes="VllmWorker", count="2", force=True)
    sleep, wake, flip, both = commander.supervisor.commands
    assert (sleep.level, wake.name, flip.cancel) == (2, WORKER, True)
    assert (both.gives, both.takes, both.count, both.force) == ("PrefillWorker", "VllmWorker", 2, True)


async def test_a_refusal_keeps_its_type_and_its_words(commander: Commander) -> None:
    """circus turns an exception in a future into a bare "server error"."""
    commander.supervisor.error = InfraUnavailable("etcd does not answer; retry once it is back")
    reply = await commander.ask("dynamo_scale", component="VllmWorker", target="3")
    assert reply["status"] == "error"
    assert reply["reason"] == "etcd does not answer; retry once it is back"
    assert (reply["code"], reply["exit_code"], reply["errno"]) == ("infra_unavailable", EXIT_FAILED, 5)


async def test_a_bug_of_ours_is_answered_and_logged(commander: Commander, caplog: pytest.LogCaptureFixture) -> None:
    commander.supervisor.error = ZeroDivisionError("oops")
    with caplog.at_level(logging.ERROR):
        reply = await commander.ask("dynamo_drain", name=WORKER)
    assert "ZeroDivisionError: oops" in str(reply["reason"])
    assert "a command failed" in caplog.text
    commander.supervisor.error = None
    assert (await commander.ask("dynamo_drain", name=WORKER))["status"] == "ok"


async def test_a_result_that_json_cannot_hold_is_answered(
    commander: Commander, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """circus would fail while it encodes the reply, and the caller would wait for ever."""

    async def run(command: object) -> dict[str, Any]:
        return {"component": object()}

    monkeypatch.setattr(commander.supervisor, "run", run)
    reply = await commander.ask("dynamo_scale", component="VllmWorker", target="3")
    assert "not JSON serializable" in str(reply["reason"])


@pytest.mark.parametrize(
    ("command", "properties", "told"),
    [
        ("dynamo_scale", {"target": "+1"}, "'component' must be a word, not null"),
        ("dynamo_scale", {"component": "VllmWorker", "target": ""}, "'target' must be a word"),
        ("dynamo_scale", {"component": "VllmWorker", "target": True}, "'target' must be a word, not true"),
        ("dynamo_scale", {"component": "VllmWorker", "target": 3, "force": "false"}, "'force' must be true or false"),
        ("dynamo_drain", {"name": ["a", "b"]}, "'name' must be a word"),
    ],
)
async def test_a_malformed_property_is_named(
    commander: Commander, command: str, properties: dict[str, Any], told: str
) -> None:
    reply = await commander.ask(command, **properties)
    assert told in str(reply["reason"])
    assert reply["exit_code"] == EXIT_BAD_INPUT
    assert commander.supervisor.commands == []


async def test_a_number_is_a_target_too(commander: Commander) -> None:
    await commander.ask("dynamo_scale", component="VllmWorker", target=-1)
    assert str(commander.supervisor.commands[0].target) == "-1"


async def test_without_a_supervisor_the_answer_is_typed(commander: Commander) -> None:
    commander.arbiter.supervisor = None
    for command in ("dynamo_scale", "stop", "quit", "rm", "signal"):
        reply = await commander.ask(command, name=WORKER, component="VllmWorker", target="1", signum="TERM")
        assert (reply["status"], reply["exit_code"]) == ("error", EXIT_NOT_RUNNING), command


async def test_a_hundred_commands_at_once_are_all_answered(commander: Commander) -> None:
    """Circus refuses all but one with errno 5; here each reply is for the one who asked."""
    hold = commander.supervisor.hold = asyncio.Event()
    held = [asyncio.ensure_future(commander.ask("dynamo_scale", component=f"C{n}", target="+1")) for n in range(25)]
    await eventually(lambda: len(commander.supervisor.commands) == 25)
    commander.supervisor.hold = None
    kinds = itertools.cycle(
        [
            ("dynamo_status", {}),
            ("dynamo_drain", {"name": WORKER}),
            ("stop", {"name": f"{WORKER}_1"}),
            ("kill", {"name": WORKER}),
            ("list", {}),
        ]
    )
    others = [(command, commander.ask(command, **properties)) for command, properties in itertools.islice(kinds, 75)]
    replies = await asyncio.gather(*(reply for _, reply in others))
    for (command, _), reply in zip(others, replies, strict=True):
        assert reply["status"] == ("error" if command == "kill" else "ok"), (command, reply)
    assert not any(task.done() for task in held)
    hold.set()
    assert [reply["component"] for reply in await asyncio.gather(*held)] == [f"C{n}" for n in range(25)]


@pytest.mark.alone
@pytest.mark.timing
async def test_status_is_answered_at_once_while_commands_wait(commander: Commander) -> None:
    """Replies never block others: 50 ms is what the issue allows."""
    commander.supervisor.hold = asyncio.Event()
    held = [asyncio.ensure_future(commander.ask("dynamo_drain", name=WORKER)) for _ in range(20)]
    await eventually(lambda: len(commander.supervisor.commands) == 20)
    seconds = []
    for _ in range(10):
        began_s = time.perf_counter()
        assert (await commander.ask("dynamo_status"))["status"] == "ok"
        seconds.append(time.perf_counter() - began_s)
    assert sorted(seconds)[5] < 0.05
    commander.supervisor.hold.set()
    await asyncio.gather(*held)


async def test_nonsense_on_the_socket_harms_nobody(commander: Commander) -> None:
    """Whatever is sent, all of it is answered, and so is the next command. circus would stall on the first of these."""
    nonsense = (b"", b"{", b"[]", b'{"command": 3}', b'{"command": "dynamo_scale", "properties": null}')
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(commander.endpoint)
        for message in nonsense:
            await socket.send(message)
        await socket.send(b'{"id": "sane", "command": "dynamo_status"}')
        replies = [json.loads(await asyncio.wait_for(socket.recv(), 5)) for _ in range(len(nonsense) + 1)]
    assert [reply["status"] for reply in replies] == ["error"] * len(nonsense) + ["ok"]
    assert replies[-1]["id"] == "sane"


async def test_an_arbiter_that_closes_drops_pending_commands_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """A reply to a closed endpoint must not raise in circus's callback."""
    with tempfile.TemporaryDirectory(prefix="dyn-") as folder:
        commander = Commander(Path(folder))
        await commander.arbiter.start()
        hold = commander.supervisor.hold = asyncio.Event()
        pending = asyncio.ensure_future(commander.ask("dynamo_drain", name=WORKER))
        while not commander.supervisor.commands:
            await asyncio.sleep(0.005)
        await commander.arbiter.close()
        hold.set()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await asyncio.sleep(0.01)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# --- from the command line -------------------------------------------------------------------------


async def test_dynamo_ctl_offers_our_commands(commander: Commander) -> None:
    """`-1` parses without `--` through click and circusctl, and a refusal is an exit code."""
    code, out, err = await commander.dynamo("ctl", "dynamo_scale", "VllmWorker", "-1", "--force")
    assert (code, out.strip()) == (0, "ok"), err
    command = commander.supervisor.commands[0]
    assert (command.component, str(command.target), command.force) == ("VllmWorker", "-1", True)
    commander.supervisor.error = BadInput("no component 'VlmWorker'; did you mean VllmWorker?")
    code, out, err = await commander.dynamo("ctl", "dynamo_scale", "VlmWorker", "=3", "--victim_policy", "coldest")
    assert (code, "did you mean VllmWorker?" in err) == (3, True)
    code, out, err = await commander.dynamo("ctl", "kill", WORKER)
    assert (code, "`dynamo drain dynamo_VllmWorker`" in err) == (3, True)


async def test_dynamo_scale_and_drain_end_to_end(commander: Commander) -> None:
    """The command line against the real endpoint: words on stdout, a refusal with its own exit code on stderr."""
    code, out, err = await commander.dynamo("scale", "VllmWorker", "-1")
    assert code == 0, err
    assert out.splitlines() == ["VllmWorker: 1 ready, 2 wanted", "dynamo_VllmWorker_1: starts"]
    commander.supervisor.error = BadInput("no worker 'nobody'")
    code, out, err = await commander.dynamo("drain", "nobody")
    assert (code, out, err) == (EXIT_BAD_INPUT, "", "dynamo: no worker 'nobody'\n")
