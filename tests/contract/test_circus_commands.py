"""Our commands, and circus's made safe, over the real endpoint of a real arbiter; only the supervisor is a fake."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dynamo_local.circus_plugins.commands import REFUSED
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_NOT_RUNNING, BadInput, InfraUnavailable
from dynamo_local.serve.processes import is_alive, wait_exit
from tests.contract.test_circus_arbiter import Harness
from tests.fakes.supervisor import FakeSupervisor

WORKER = "dynamo_VllmWorker"
ASLEEP = "import time; print('up', flush=True); time.sleep(60)"


class Commander(Harness):
    """The harness with a fake supervisor, at the endpoint where `dynamo --namespace dynamo` looks for it."""

    def __init__(self, root: Path) -> None:
        folder = root / "dynamo" / "dynamo"
        folder.mkdir(parents=True)
        super().__init__(folder)
        self.root = root
        self.supervisor = FakeSupervisor([WORKER, f"{WORKER}_1"])
        self.arbiter.supervisor = self.supervisor

    async def dynamo(self, *words: str) -> tuple[int, str, str]:
        """Run the command line in a process of its own: exit code, stdout, stderr."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", "dynamo_local.cli.main", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.root), "DYN_LOCAL_LOG_DIR": str(self.root / "logs")},
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def commander() -> AsyncIterator[Commander]:
    """A running arbiter; whatever it still runs is killed afterwards. The folder is short: a socket lies in it."""
    with tempfile.TemporaryDirectory(prefix="dyn-") as folder:
        commander = Commander(Path(folder))
        await commander.arbiter.start()
        yield commander
        for watcher in commander.arbiter.watchers:
            for pid in list(watcher.processes):
                os.kill(pid, signal.SIGKILL)
                await wait_exit(pid, 5)
        await asyncio.sleep(0)
        await commander.arbiter.close()


async def up(commander: Commander, name: str, code: str = ASLEEP) -> int:
    """Start a process that says when it is up, and wait for that; its pid."""
    pid = await commander.run(name, code)
    deadline_s = time.monotonic() + 10
    while not (commander.folder / f"{name}.log").read_text():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    return pid


# --- ours ------------------------------------------------------------------------------------------


async def test_a_reply_carries_the_result_although_nobody_asked_to_wait(commander: Commander) -> None:
    """circus would answer a bare ok at once; the intent, and the id to find it again in the events, come instead."""
    reply = await commander.ask("dynamo_scale", component="VllmWorker", target="+1", victim_policy="coldest")
    assert reply["status"] == "ok"
    assert reply["instructions"] == [{"kind": "spawn", "watcher_name": "dynamo_VllmWorker_1"}]
    stimulus_id = reply["stimulus_id"]
    assert str(stimulus_id).startswith("scale:")
    options = {"force": False, "victim_policy": "coldest", "stimulus_id": stimulus_id}
    assert commander.supervisor.calls == [("scale", ("VllmWorker", "+1"), options)]


async def test_drain_and_restart_reach_the_supervisor(commander: Commander) -> None:
    """With their options, each defaulting to no."""
    await commander.ask("dynamo_drain", name=WORKER, cancel=True)
    await commander.ask("dynamo_restart", name="VllmWorker", rolling=True, force=True)
    (_, drained, first), (_, restarted, second) = commander.supervisor.calls
    assert (drained, first["cancel"], first["force"]) == ((WORKER,), True, False)
    assert (restarted, second["rolling"], second["force"]) == (("VllmWorker",), True, True)


async def test_a_refusal_keeps_its_type_and_its_words(commander: Commander) -> None:
    """circus turns an exception in a future into a bare "server error"."""
    commander.supervisor.error = InfraUnavailable("etcd does not answer; retry once it is back")
    reply = await commander.ask("dynamo_scale", component="VllmWorker", target="3")
    assert reply["status"] == "error"
    assert reply["reason"] == "etcd does not answer; retry once it is back"
    assert (reply["code"], reply["exit_code"], reply["errno"]) == ("infra_unavailable", EXIT_FAILED, 5)


async def test_a_bug_of_ours_is_answered_and_logged(commander: Commander, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for a reply that never comes, and the arbiter serves on."""
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

    async def scale(*_: object, **__: object) -> dict[str, Any]:
        return {"component": object()}

    monkeypatch.setattr(commander.supervisor, "scale", scale)
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
    """Parsed at the edge; the supervisor is not asked."""
    reply = await commander.ask(command, **properties)
    assert told in str(reply["reason"])
    assert reply["exit_code"] == EXIT_BAD_INPUT
    assert commander.supervisor.calls == []


async def test_a_number_is_a_target_too(commander: Commander) -> None:
    """JSON clients send 3 and -1 as numbers."""
    await commander.ask("dynamo_scale", component="VllmWorker", target=-1)
    assert commander.supervisor.calls[0][1] == ("VllmWorker", "-1")


async def test_without_a_supervisor_the_answer_is_typed(commander: Commander) -> None:
    """While the arbiter starts or leaves."""
    commander.arbiter.supervisor = None
    for command in ("dynamo_scale", "stop", "quit", "rm", "signal"):
        reply = await commander.ask(command, name=WORKER, component="VllmWorker", target="1", signum="TERM")
        assert (reply["status"], reply["exit_code"]) == ("error", EXIT_NOT_RUNNING), command


async def test_a_hundred_commands_at_once_are_all_answered(commander: Commander) -> None:
    """Lesson 13: circus refuses all but one with errno 5; here each reply is for the one who asked."""
    hold = commander.supervisor.hold = asyncio.Event()
    held = [asyncio.ensure_future(commander.ask("dynamo_scale", component=f"C{n}", target="+1")) for n in range(25)]
    while len(commander.supervisor.calls) < 25:
        await asyncio.sleep(0.005)
    commander.supervisor.hold = None
    kinds = itertools.cycle(
        [
            ("dynamo_status", {}),
            ("dynamo_drain", {"name": WORKER}),
            ("stop", {"name": f"{WORKER}_1"}),
            ("incr", {"name": WORKER}),
            ("list", {}),
        ]
    )
    others = [(command, commander.ask(command, **properties)) for command, properties in itertools.islice(kinds, 75)]
    replies = await asyncio.gather(*(reply for _, reply in others))
    for (command, _), reply in zip(others, replies, strict=True):
        assert reply["status"] == ("error" if command == "incr" else "ok"), (command, reply)
    assert not any(task.done() for task in held)
    hold.set()
    assert [reply["component"] for reply in await asyncio.gather(*held)] == [f"C{n}" for n in range(25)]


async def test_status_is_answered_at_once_while_commands_wait(commander: Commander) -> None:
    """Replies never block others: 50 ms is what the issue allows."""
    commander.supervisor.hold = asyncio.Event()
    held = [asyncio.ensure_future(commander.ask("dynamo_drain", name=WORKER)) for _ in range(20)]
    await asyncio.sleep(0.05)
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
        while not commander.supervisor.calls:
            await asyncio.sleep(0.005)
        await commander.arbiter.close()
        hold.set()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await asyncio.sleep(0.01)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# --- circus's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", sorted(REFUSED))
async def test_a_refused_command_says_why_and_names_ours(commander: Commander, command: str) -> None:
    """Stock circusctl stays safe: the supervisor is not asked, and its user learns what to type."""
    reply = await commander.ask(command, name=WORKER, options={}, cmd="sleep")
    assert (reply["status"], reply["code"], reply["exit_code"]) == ("error", "bad_input", EXIT_BAD_INPUT)
    assert str(reply["reason"]).startswith(f"`{command}` is refused: ")
    assert "`dynamo " in str(reply["reason"])
    assert commander.supervisor.calls == []


async def test_stop_and_rm_are_a_drain_of_the_worker_as_we_spell_it(commander: Commander) -> None:
    """circus's `list` lower-cases names, so that is what people paste."""
    for command in ("stop", "rm"):
        reply = await commander.ask(command, name=WORKER.lower())
        assert (reply["status"], reply["watcher_name"], reply["state"]) == ("ok", WORKER, "draining")
    for (method, words, options), command in zip(commander.supervisor.calls, ("stop", "rm"), strict=True):
        assert (method, words) == ("drain", (WORKER,))
        assert (options["cancel"], options["force"]) == (False, False)
        assert options["stimulus_id"].startswith(f"circusctl-{command}:")


async def test_a_stop_that_waits_is_answered_when_the_worker_is_gone(commander: Commander) -> None:
    """As circus's `--waiting`; other commands are answered meanwhile."""
    stopping = asyncio.ensure_future(commander.ask("stop", name=WORKER, waiting=True))
    while not commander.supervisor.calls:
        await asyncio.sleep(0.005)
    assert (await commander.ask("dynamo_status"))["status"] == "ok"
    assert not stopping.done()
    del commander.supervisor.rows[WORKER]
    assert (await asyncio.wait_for(stopping, 5))["state"] == "exited"


async def test_quit_and_a_stop_without_a_name_are_a_down(commander: Commander) -> None:
    """Never a kill of everything at once; with `waiting`, one request only: a second one would end at once."""
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
    """The process lives, and nobody was asked to end it."""
    pid = await up(commander, WORKER)
    await commander.run("dynamo_etcd", ASLEEP)
    reply = await commander.ask(command, **properties)
    assert (reply["status"], reply["exit_code"]) == ("error", EXIT_BAD_INPUT)
    assert told in str(reply["reason"])
    assert commander.supervisor.calls == []
    assert is_alive(pid)


async def test_a_signal_to_leave_is_a_drain(commander: Commander) -> None:
    """The signal itself is not sent: how a worker leaves is decided by its role."""
    pid = await up(commander, WORKER)
    for signum in ("TERM", signal.SIGINT, "15"):
        assert (await commander.ask("signal", name=WORKER.lower(), signum=signum))["state"] == "draining"
    assert [method for method, *_ in commander.supervisor.calls] == ["drain"] * 3
    assert is_alive(pid)


@pytest.mark.parametrize("signum", ["KILL", "STOP", "QUIT", "HUP", "ABRT", "USR1", "USR2", "RTMIN"])
async def test_a_signal_that_would_end_or_stop_a_worker_is_refused(commander: Commander, signum: str) -> None:
    """USR1 among them: this worker has no handler, and the default is to die."""
    pid = await up(commander, WORKER)
    reply = await commander.ask("signal", name=WORKER, signum=signum)
    assert reply["status"] == "error"
    assert f"`signal SIG{signum}` is refused" in str(reply["reason"])
    assert f"`dynamo drain {WORKER}`" in str(reply["reason"])
    assert is_alive(pid)


async def test_a_signal_that_the_worker_handles_reaches_it(commander: Commander) -> None:
    """A person may ask a process for its stack by USR1; CONT harms nobody."""
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
    """Lesson 11: `circusctl get NAME env` printed the whole environment."""
    await up(commander, WORKER)
    reply = await commander.ask("get", name=WORKER, keys=["env", "singleton"])
    assert reply["options"]["singleton"] is True
    assert "hush" not in json.dumps(reply)
    assert (await commander.ask("get", name=WORKER, keys=["nothing"]))["exit_code"] == EXIT_BAD_INPUT


# --- from the command line -------------------------------------------------------------------------


async def test_dynamo_ctl_offers_our_commands(commander: Commander) -> None:
    """`-1` parses without `--` through click and circusctl, and a refusal is an exit code."""
    code, out, err = await commander.dynamo("ctl", "dynamo_scale", "VllmWorker", "-1", "--force")
    assert (code, out.strip()) == (0, "ok"), err
    _, words, options = commander.supervisor.calls[0]
    assert (words, options["force"]) == (("VllmWorker", "-1"), True)
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
