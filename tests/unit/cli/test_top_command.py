"""`dynamo top` around its picture: one frame for a pipe, a terminal left as it was, an arbiter that goes away."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo_local.cli import top
from dynamo_local.cli.top import Keys, Watch, last_decision
from dynamo_local.errors import NotRunning
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records.decision_log import DecisionRecord, Inputs
from dynamo_local.planner.values import Decision, Pool, Reason, Rule, WorkerPools
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.fakes.arbiter.supervisor import FakeSupervisor

GRAPH = {**FakeSupervisor(["dynamo_VllmWorker"]).status(), "gpus": [], "prefill_queue": None}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the arbiter answers, in turn: a graph, or an error; the last one stays."""
    answers: list[object] = [GRAPH]

    def ask(*_words: object, **_properties: object) -> dict[str, object]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"graph": answer}

    monkeypatch.setattr(top, "ask_arbiter", ask)
    return answers


@pytest.mark.parametrize("words", [["--once"], []])
def test_a_pipe_gets_one_frame(
    looks: list[object], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "top", *words) == 0
    printed = capsys.readouterr().out
    assert "VllmWorker" in printed
    assert "\x1b" not in printed


def test_json_is_one_object(
    looks: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "top", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [worker["watcher_name"] for worker in told["workers"]] == ["dynamo_VllmWorker"]


def test_nothing_that_runs_is_exit_code_3(
    looks: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks[:] = [NotRunning("nothing runs in namespace 'dynamo'")]
    assert dynamo(monkeypatch, "top", "--once") == 3
    assert "nothing runs in namespace 'dynamo'" in capsys.readouterr().err


@pytest.mark.parametrize("refresh", ["0", "0.1", "x"])
def test_a_refresh_that_would_be_a_load_is_refused(
    looks: list[object], refresh: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "top", "--refresh", refresh) == 2
    assert "--refresh" in capsys.readouterr().err


def test_an_arbiter_that_goes_away_leaves_its_picture_and_one_that_comes_back_is_shown() -> None:
    answers: list[object] = [GRAPH, NotRunning("it has been killed"), {**GRAPH, "run_id": "01K"}]

    def see() -> dict[str, object]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    watch = Watch(see, lambda: 0.0)
    first, lost, back = watch.look(), watch.look(), watch.look()
    assert first.lost is None
    assert (lost.lost, lost.graph, lost.at) == ("it has been killed", GRAPH, first.at)
    assert (back.lost, back.graph["run_id"]) == (None, "01K")


def _record() -> DecisionRecord:
    fleet = WorkerPools(Pool("PrefillWorker", 1, ready=1, gpus_held=1), Pool("VllmWorker", 1, ready=1, gpus_held=1))
    reason = Reason("VllmWorker", 0, Rule.MISSING, {"gpus_counted": 2, "max_gpu_budget": 8})
    inputs, decision = Inputs(0.0, 0, None, None, None, fleet), Decision(9.0, {}, (reason,), 39.0)
    return DecisionRecord(1.8e9, "planner:17", inputs, decision)


def _decided(**more: object) -> dict[str, object]:
    """A graph whose planner has decided once; `more` replaces parts of the record."""
    record = {**decisions.as_json(_record()), **more}
    return {**GRAPH, "planner": {"state": "running", "last_decision": record}}


def test_the_last_decision_is_told_in_words_with_its_number_and_time() -> None:
    head, *lines = last_decision(_decided())
    assert head.startswith("planner:17 at ")
    assert any("VllmWorker" in line for line in lines)
    assert last_decision(GRAPH) == ()


def test_a_decision_of_another_version_is_told_in_short() -> None:
    (line,) = last_decision(_decided(inputs={"of": "another version"}))
    assert line.endswith("VllmWorker hold (missing)")


# --- at a terminal -----------------------------------------------------------------------------


def test_q_leaves_other_keys_do_not_and_the_terminal_is_what_it_was() -> None:
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        with Keys(theirs) as keys:
            assert termios.tcgetattr(theirs) != before
            os.write(ours, b"x")
            assert keys.quit_within(0.05) is False
            os.write(ours, b"Q")
            assert keys.quit_within(5.0) is True
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


def test_without_a_keyboard_it_waits_in_quiet() -> None:
    read, write = os.pipe()
    os.close(write)
    began_s = time.monotonic()
    with Keys(read) as keys:
        assert keys.quit_within(0.05) is False
    os.close(read)
    assert time.monotonic() - began_s >= 0.04


@contextmanager
def _arbiter(paths: Paths) -> Iterator[threading.Event]:
    """Something that answers `dynamo_status` on the control socket until the event is set."""
    import zmq

    gone = threading.Event()

    def serve() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(paths.circus_endpoint)
            while not gone.is_set():
                if socket.poll(20):
                    client, request = socket.recv_multipart()
                    answer = {"id": json.loads(request)["id"], "status": "ok", "graph": GRAPH}
                    socket.send_multipart([client, json.dumps(answer).encode()])
        paths.control_socket.unlink(missing_ok=True)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield gone
    finally:
        gone.set()
        thread.join(5.0)


class Screen:
    """`dynamo top` on a terminal of its own."""

    def __init__(self, env: dict[str, str]) -> None:
        self._fd, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo_local.cli.main", "top", "--refresh", "0.2"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, **env, "TERM": "xterm", "COLUMNS": "80"},
            start_new_session=True,
        )
        self._theirs = theirs
        self.text = ""

    def until(self, words: str, timeout_s: float = 20.0) -> None:
        """Read on until it has said so."""
        deadline_s = time.monotonic() + timeout_s
        while words not in self.text:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, self.text
            if select.select([self._fd], [], [], left_s)[0]:
                self.text += os.read(self._fd, 65536).decode()

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def attributes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5.0)
        os.close(self._fd)
        os.close(self._theirs)


@pytest.fixture
def paths(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paths]:
    """Of a namespace in a runtime folder of its own; short, a unix socket's path has 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        found = Paths.of("dynamo", os.environ)
        found.control_socket.parent.mkdir(parents=True, mode=0o700)
        yield found


@pytest.mark.parametrize(("how", "code"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_live_view_follows_an_arbiter_and_leaves_the_terminal_as_it_was(
    paths: Paths, how: str | signal.Signals, code: int
) -> None:
    with _arbiter(paths) as gone:
        screen = Screen({})
        try:
            screen.until("VllmWorker")
            gone.set()
            screen.until("Waiting for it; q leaves")
            if isinstance(how, signal.Signals):
                screen.process.send_signal(how)
            elif how == "\x03":
                screen.process.send_signal(signal.SIGINT)
            else:
                screen.press(how)
            assert screen.process.wait(30.0) == code
            screen.until("\x1b[?1049l")  # the alternate screen is left
            assert screen.attributes() == screen.before
        finally:
            screen.close()


def test_top_speaks_of_no_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="nothing runs in namespace 'none'"):
        top.look(Paths.of("none", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}))
