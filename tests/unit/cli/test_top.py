"""`dynamo top`: the picture as text at fixed widths, and the command around it."""

from __future__ import annotations

import io
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
from typing import Any

import pytest
from rich.console import Console

from dynamo_local.cli import top
from dynamo_local.cli.top import Frame, Histories, Keys, Watch, last_decision, render, shorten, sparkline, view_as_json
from dynamo_local.errors import NotRunning
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records.decision_log import DecisionRecord, Inputs
from dynamo_local.planner.values import Decision, FixedFleet, Pool, Reason, Rule, WorkerPools
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.fakes.arbiter.supervisor import FakeSupervisor, status_row

LOAD = {
    "request_active_slots": 12,
    "request_total_slots": 256,
    "kv_total_blocks": 100,
    "num_requests_waiting": 3,
    "gpu_cache_usage_perc": 0.63,
}


def _gpu(index: int, worker: str | None = None, state: str | None = None, reason: str | None = None) -> dict[str, Any]:
    own = state or ("free" if worker is None else "held")
    return {"index": index, "uuid": f"GPU-{index}", "name": "X", "state": own, "worker": worker, "reason": reason}


def _graph(gpus: list[dict[str, Any]], *workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"namespace": "dynamo", "run_id": "01J", "state": "ready", "frontend_url": "http://127.0.0.1:8000"}
    return {**head, "prefill_queue": None, "gpus": gpus, "workers": list(workers), "notes": [], **more}


def _worker(name: str, state: str = "ready", load: dict[str, Any] | None = LOAD, **more: Any) -> dict[str, Any]:
    return status_row(f"dynamo_{name}", state, **{"load": load, "uptime_s": 187.0, **more})


def _shown(frame: Frame, width: int = 120, height: int | None = None, **options: Any) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(frame, width, height, **options))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width, "a line is wider than the terminal"
    return [line.rstrip() for line in lines]


def _row(lines: list[str], first: str) -> str:
    """The one line that begins with that word, blanks squeezed."""
    found = [" ".join(line.split()) for line in lines if line.split()[:1] == [first]]
    assert len(found) == 1, (first, lines)
    return found[0]


# --- GPUs and workers --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_each_gpu_has_its_worker_with_its_load(width: int) -> None:
    graph = _graph([_gpu(0, "dynamo_VllmWorker"), _gpu(1)], _worker("VllmWorker"), _worker("Frontend", load=None))
    histories = Histories()
    histories.add(graph)
    lines = _shown(Frame(graph, histories, at="14:05:09"), width)
    assert lines[0] == "dynamo  ready  1 of 2 GPUs held  http://127.0.0.1:8000  14:05:09"
    assert _row(lines, "0").startswith("0 VllmWorker ready 63% ▆ 12/256 3 ▄")
    assert _row(lines, "1") == "1 free"
    assert _row(lines, "-").startswith("- Frontend ready - - -")  # not known, and no 0
    assert ("3m07s" in _row(lines, "0")) is (width == 120)


def test_all_rows_show_their_waiting_requests_on_one_scale() -> None:
    few, many = ({**LOAD, "num_requests_waiting": count} for count in (2, 16))
    lonely = _graph([], _worker("VllmWorker", load=few))
    histories = Histories()
    histories.add(lonely)
    assert _row(_shown(Frame(lonely, histories), 80), "-").endswith(" 2 ▃"), "two are not a full block"
    both = _graph([], _worker("VllmWorker", load=few), _worker("VllmWorker_1", load=many))
    histories.add(both)
    rows = [line.split() for line in _shown(Frame(both, histories), 80) if line.startswith("-")]
    assert [row[-2:] for row in rows] == [["2", "▂▂"], ["16", "█"]]


@pytest.mark.parametrize("width", [80, 120])
def test_eight_gpus_with_workers_of_two_are_a_row_for_each_worker(width: int) -> None:
    names = [f"dynamo_VllmWorker{f'_{n}' if n else ''}" for n in range(4)]
    gpus = [_gpu(index, names[index % 4]) for index in range(8)]  # not neighbours
    lines = _shown(Frame(_graph(gpus, *(_worker(name.removeprefix("dynamo_")) for name in names))), width)
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["0,4", "VllmWorker"],
        ["1,5", "VllmWorker_1"],
        ["2,6", "VllmWorker_2"],
        ["3,7", "VllmWorker_3"],
    ]


def test_a_quarantined_and_a_taken_gpu_say_why() -> None:
    gpus = [
        _gpu(0, None, "quarantined", "pid 4711 python (40.2 GiB) still holds it"),
        _gpu(1, None, "taken", "namespace other"),
    ]
    lines = _shown(Frame(_graph(gpus)))
    assert _row(lines, "0") == "0 quarantined"
    assert any("0 is quarantined: pid 4711 python (40.2 GiB) still holds it" in line for line in lines)
    assert any("1 is taken: namespace other" in line for line in lines)


def test_a_graph_without_gpus_shows_its_workers_and_speaks_of_no_gpus() -> None:
    lines = _shown(Frame(_graph([], _worker("VllmWorker"))), 80)
    assert "GPUs" not in lines[0]
    assert _row(lines, "-").startswith("- VllmWorker ready 63%")


def test_an_arbiter_of_an_older_version_is_shown_as_far_as_it_tells() -> None:
    graph = _graph([], _worker("VllmWorker"))
    del graph["gpus"]
    assert _row(_shown(Frame(graph)), "-").startswith("- VllmWorker ready")


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_name_keeps_the_workers_number_and_the_columns_their_places(width: int) -> None:
    name = "AComponentWhoseNameIsMuchTooLongForAnyTerminalThatAnybodyHasOnTheirDesk_12"
    lines = _shown(Frame(_graph([_gpu(0, f"dynamo_{name}"), _gpu(1)], _worker(name))), width)
    row = _row(lines, "0")
    assert "…" in row
    assert "esk_12 ready 63%" in row
    assert len(lines) == 5  # nothing is wrapped


def test_a_terminal_that_is_too_low_is_told_how_many_workers_are_left_out() -> None:
    graph = _graph([_gpu(n, f"dynamo_W_{n}") for n in range(20)], *(_worker(f"W_{n}") for n in range(20)))
    lines = _shown(Frame(graph), 80, 12)
    assert len(lines) <= 12
    assert "12 more do not fit; `dynamo status` lists all" in lines
    assert _row(lines, "7").startswith("7 W_7 ready")
    assert not any("do not fit" in line for line in _shown(Frame(graph), 80, 40))


# --- below -------------------------------------------------------------------------------------


def test_a_drain_tells_what_is_left_and_when_it_ends() -> None:
    drain = {"left_requests": 3, "left_tokens": 4120, "eta_s": 12.0, "deadline_s": 588.0}
    graph = _graph([_gpu(0, "dynamo_VllmWorker_1")], _worker("VllmWorker_1", "draining", drain=drain))
    lines = _shown(Frame(graph), 80)
    assert "drain  VllmWorker_1: 3 requests left (4120 tokens), about 12s, at most 9m48s" in lines


def test_notes_are_told_with_their_times() -> None:
    note = {"text": "no room on the disk", "count": 2, "first_at": 0.0, "last_at": 60.0}
    lines = _shown(Frame(_graph([], _worker("A"), notes=[note])))
    assert _row(lines, "note").startswith("note no room on the disk (2 times, 19")


def test_a_worker_that_failed_tells_why() -> None:
    lines = _shown(Frame(_graph([], _worker("VllmWorker", "faulted", None, reason="was killed by SIGKILL"))))
    assert "trouble  VllmWorker is faulted: was killed by SIGKILL" in lines


def test_what_a_degraded_graph_lacks_is_told_first() -> None:
    graph = {**_graph([], _worker("VllmWorker", "exited", None)), "missing": ["VllmWorker: no worker serves"]}
    lines = _shown(Frame(graph))
    assert "missing  VllmWorker: no worker serves" in lines


def test_the_queue_has_a_history_and_dead_letters_are_told() -> None:
    histories = Histories()
    for pending in (0, 4, 8):
        queue = {"pending": pending, "outstanding": 2, "dead_letters": 1}
        graph = _graph([], prefill_queue=queue)
        histories.add(graph)
    line = next(line for line in _shown(Frame(graph, histories)) if line.startswith("prefill"))
    assert " ".join(line.split()) == "prefill 8 waiting ▁▅█ 2 outstanding 1 given up (dead letters)"


def test_a_queue_that_cannot_be_seen_is_a_dash() -> None:
    graph = _graph([], prefill_queue={"pending": None, "outstanding": None, "dead_letters": None})
    assert any(line.startswith("prefill  - waiting") for line in _shown(Frame(graph)))


def test_the_planner_tells_its_state_its_trouble_and_its_last_decision() -> None:
    planner = {
        "state": "running",
        "no_operation": True,
        "next_decision_s": 12.3,
        "waiting_for_gpus": ["VllmWorker"],
        "fixed_fleet": FixedFleet(1.0, 0.991, 6.3, (5, 2), 0.992, 7.0).as_json(),
        "trouble": "holds: etcd does not answer",
        "last_decision": {"seq": 4},
    }
    lines = _shown(Frame(_graph([], planner=planner), words=("VllmWorker +1: mean KV load 0.93 is above 0.9",)))
    first = "planner  running, no operation: decides, acts on nothing, decides in 12s, waits for GPUs: VllmWorker"
    at = lines.index(first)
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        "10.0 % fewer GPU-hours than the fixed fleet 5P2D (last 1.0 h; 99.1 % kept, the fixed fleet 99.2 %)",
        "holds: etcd does not answer",
        "VllmWorker +1: mean KV load 0.93 is above 0.9",
    ]


def test_a_planner_that_never_ran_is_not_spoken_of() -> None:
    planner = {"state": "stopped", "no_operation": False, "last_decision": None}
    assert not any(line.startswith("planner") for line in _shown(Frame(_graph([], planner=planner))))


def test_when_the_arbiter_is_gone_the_last_picture_stays_and_says_so() -> None:
    graph = _graph([_gpu(0, "dynamo_VllmWorker")], _worker("VllmWorker"))
    lines = _shown(Frame(graph, lost="the arbiter of 'dynamo' has been killed"))
    assert lines[1].startswith("the arbiter of 'dynamo' has been killed; this is how it was.")
    assert any("VllmWorker" in line for line in lines)


# --- histories ---------------------------------------------------------------------------------


def test_a_sparkline_ends_with_now_and_shows_a_gap_where_nothing_is_known() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], 6, 1.0) == "  ▁▅·█"
    assert sparkline([1, 2, 3, 4, 5, 6], 3, 6.0) == "▆▇█"
    assert sparkline([0, 0], 3, 8.0) == " ▁▁"
    assert sparkline([None, None], 3, 8.0) == "   "
    assert sparkline([], 3, 8.0) == "   "
    assert sparkline([0.2, 7.0], 2, 1.0) == "▂█"  # above the top is the top


def test_histories_are_of_one_run_and_forget_workers_that_are_gone() -> None:
    histories = Histories()
    for _ in range(100):
        histories.add(_graph([], _worker("VllmWorker")))
    assert histories.of("dynamo_VllmWorker", "kv") == (0.63,) * 60
    histories.add(_graph([], _worker("VllmWorker", "starting", None)))
    assert histories.of("dynamo_VllmWorker", "kv")[-2:] == (0.63, None)
    histories.add(_graph([], _worker("Other")))
    assert histories.of("dynamo_VllmWorker", "kv") == ()
    histories.add({**_graph([], _worker("Other")), "run_id": "01K"})
    assert len(histories.of("dynamo_Other", "kv")) == 1


def test_a_terminal_without_unicode_gets_ascii() -> None:
    name = "AComponentWhoseNameIsMuchTooLongForTheTerminal"
    graph = _graph(
        [_gpu(0, f"dynamo_{name}"), _gpu(1)], _worker(name), frontend_url="http://127.0.0.1:8000/" + "x" * 90
    )
    histories = Histories()
    for load in (LOAD, None, LOAD):
        histories.add(_graph([], _worker(name, load=load)))
    assert "".join(_shown(Frame(graph, histories), 80, ascii_only=True)).isascii()


def test_shorten_keeps_beginning_and_end() -> None:
    assert shorten("VllmWorker_1", 12) == "VllmWorker_1"
    assert shorten("AVeryLongComponentName_12", 16) == "AVeryLong…ame_12"
    assert all(len(shorten("AVeryLongComponentName_12", cells)) == cells for cells in range(2, 25))


def test_the_last_minute_of_each_component_stands_below_the_workers() -> None:
    share = {"p50": 12.3, "p95": None}
    figures = {"seconds": 60.0, "requests_per_s": 4.2, "tokens_per_s": 1280.4, "ttft_ms": share, "itl_ms": share}
    graph = _graph([], _worker("VllmWorker"), components={"VllmWorker": figures, "PrefillWorker": None})
    lines = _shown(Frame(graph), 80)
    assert _row(lines, "PrefillWorker") == "PrefillWorker - - - - - -"
    assert _row(lines, "VllmWorker") == "VllmWorker 4.20 1,280 12.3 ms - 12.3 ms -"
    assert view_as_json(Frame(graph))["components"] == graph["components"]


# --- JSON --------------------------------------------------------------------------------------


def test_json_says_what_the_picture_says() -> None:
    drain = {"left_requests": 3, "left_tokens": None, "eta_s": None, "deadline_s": 588.0}
    graph = _graph(
        [_gpu(0, "dynamo_VllmWorker"), _gpu(1)],
        _worker("VllmWorker", "draining", drain=drain, gpus=["0"]),
        _worker("Frontend", load=None),
        planner={"state": "running"},
    )
    told = view_as_json(Frame(graph, words=("held",)))
    assert [gpu["worker_state"] for gpu in told["gpus"]] == ["draining", None]
    assert [(row["kv"], row["running"], row["waiting"]) for row in told["workers"]] == [(0.63, 12, 3), (None,) * 3]
    assert told["workers"][0]["drain"] == drain
    assert told["planner"] == {"state": "running", "words": ["held"]}


# --- top command
# `dynamo top` around its picture: one frame for a pipe, a terminal left as it was, an arbiter that goes away.

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

    def __init__(self, namespace: str) -> None:
        self._fd, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo_local.cli.main", "top", "--refresh", "0.2", "-n", namespace],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
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

    def ended(self, timeout_s: float = 30.0) -> int:
        """Read on until the process has ended, for a terminal that nobody reads holds it up. Its exit code."""
        deadline_s = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline_s, self.text
            if select.select([self._fd], [], [], 0.05)[0]:
                self.text += os.read(self._fd, 65536).decode(errors="replace")
        return code

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
def paths(namespace: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """The paths of a namespace that nobody else runs. Its runtime folder is its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    found = Paths.of(namespace, os.environ)
    found.control_socket.parent.mkdir(parents=True, mode=0o700)
    return found


@pytest.mark.parametrize(("how", "code"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_live_view_follows_an_arbiter_and_leaves_the_terminal_as_it_was(
    paths: Paths, how: str | signal.Signals, code: int
) -> None:
    with _arbiter(paths) as gone:
        screen = Screen(paths.namespace)
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
            assert screen.ended() == code
            screen.until("\x1b[?1049l")  # the alternate screen is left
            assert screen.attributes() == screen.before
        finally:
            screen.close()


def test_top_speaks_of_no_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="nothing runs in namespace 'none'"):
        top.look(Paths.of("none", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}))
