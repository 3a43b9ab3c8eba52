"""`dynamo scale`, `drain` and `restart` as they are typed: words, exit codes, JSON, waiting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY, EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK, EXIT_TIMED_OUT
from tests.fakes.arbiter.scripted_arbiter import ScriptedArbiter, dynamo
from tests.fakes.arbiter.supervisor import status_row

NAME = "dynamo_VllmWorker"
SPAWNED = {
    "component": "VllmWorker",
    "instructions": [{"kind": "spawn", "watcher_name": f"{NAME}_1"}],
    "ready": 1,
    "target": 2,
    "stimulus_id": "scale:1f0c9a3e",
}
DRAINED = {
    "component": "VllmWorker",
    "instructions": [{"kind": "drain", "watcher_name": f"{NAME}_1"}],
    "ready": 2,
    "target": 1,
}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_LOCAL_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)


def one(name: str, *states: str, **more: Any) -> list[Sequence[dict[str, Any]]]:
    """Looks at a graph of one worker, a state each."""
    return [[status_row(name, state, **more)] for state in states]


# --- parsing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["+1", "-1", "=3", "3", "-12", "+64", "=0", "0"])
@pytest.mark.parametrize(
    "words",
    [
        ["scale", "VllmWorker", "{}"],
        ["scale", "VllmWorker", "{}", "--force"],
        ["scale", "--force", "VllmWorker", "{}"],
        ["scale", "VllmWorker", "--", "{}"],
        ["scale", "-n", "dynamo", "VllmWorker", "{}", "--victim-policy", "coldest"],
    ],
)
def test_targets_parse_without_a_double_dash(monkeypatch: pytest.MonkeyPatch, target: str, words: list[str]) -> None:
    arbiter = ScriptedArbiter(SPAWNED).install(monkeypatch)
    assert dynamo(monkeypatch, *(word.format(target) for word in words)) == EXIT_OK
    ((command, asked),) = arbiter.asked
    assert command == "dynamo_scale"
    assert asked == {
        "component": "VllmWorker",
        "target": target,
        "force": "--force" in words,
        "victim_policy": "coldest" if "coldest" in words else None,
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["VllmWorker", "--frce"], "no such option '--frce'"),
        (["VllmWorker", "-x"], "no such option '-x'"),
        (["VllmWorker", "three"], "not 'three'"),
        (["VllmWorker", "1.5"], "not '1.5'"),
        (["VllmWorker", "++1"], "not '++1'"),
        (["VllmWorker", "٣"], "not '٣'"),
        (["VllmWorker", "-1", "--frce"], "unexpected extra argument (--frce)"),
        (["VllmWorker"], "Missing argument 'TARGET'"),
        (["-1"], "Missing argument 'TARGET'"),
        (["VllmWorker", "-1", "--victim-policy", "oldest"], "'oldest' is not one of 'highest-suffix'"),
        (["VllmWorker", "-1", "--wait", "--timeout", "0"], "0.0 is not in the range 0<x<="),
    ],
)
def test_what_is_no_target_is_told_and_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    arbiter = ScriptedArbiter(SPAWNED).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", *words) == EXIT_BAD_INPUT
    assert told in capsys.readouterr().err
    assert arbiter.asked == []


def test_drain_and_restart_send_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    arbiter = ScriptedArbiter({"watcher_name": NAME, "state": "draining", "workers": [NAME]}).install(monkeypatch)
    for words in (["drain", NAME], ["drain", NAME, "--cancel", "--force"]):
        assert dynamo(monkeypatch, *words) == EXIT_OK
    for words in (["restart", NAME], ["restart", "VllmWorker", "--rolling", "--force"]):
        assert dynamo(monkeypatch, *words) == EXIT_OK
    assert arbiter.asked == [
        ("dynamo_drain", {"name": NAME, "cancel": False, "force": False}),
        ("dynamo_drain", {"name": NAME, "cancel": True, "force": True}),
        ("dynamo_restart", {"name": NAME, "rolling": False, "force": False}),
        ("dynamo_restart", {"name": "VllmWorker", "rolling": True, "force": True}),
    ]


# --- answers ---------------------------------------------------------------------------------------


def test_scale_says_what_happens_to_whom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for the component and one for each worker; a kind that this version does not know is told as it is."""
    kinds = ["spawn", "drain", "cancel_drain", "take_back", "move_over"]
    instructions = [{"kind": kind, "watcher_name": f"w{n}"} for n, kind in enumerate(kinds)]
    ScriptedArbiter({**SPAWNED, "instructions": instructions}).install(monkeypatch)
    dynamo(monkeypatch, "scale", "VllmWorker", "+1")
    assert capsys.readouterr().out.splitlines() == [
        "VllmWorker: 1 ready, 2 wanted",
        "w0: starts",
        "w1: drains",
        "w2: serves on: its drain is taken back",
        "w3: is taken back before it is ready",
        "w4: move over",
    ]


def test_a_scale_that_changes_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ScriptedArbiter({**SPAWNED, "instructions": [], "ready": 2}).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "2", "--wait") == EXIT_OK
    assert capsys.readouterr().out == "VllmWorker: 2 ready, 2 wanted; nothing to do\n"


def test_restart_names_its_workers_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ScriptedArbiter({"workers": ["b", {"watcher_name": "a", "state": "draining"}]}).install(monkeypatch)
    dynamo(monkeypatch, "restart", "VllmWorker")
    assert capsys.readouterr().out == "to be restarted: b, a\n"


def test_json_is_the_reply_without_circuss_envelope(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ScriptedArbiter(SPAWNED).install(monkeypatch)
    dynamo(monkeypatch, "scale", "VllmWorker", "+1", "--json")
    assert json.loads(capsys.readouterr().out) == SPAWNED


@pytest.mark.parametrize("exit_code", [EXIT_FAILED, EXIT_BAD_INPUT, EXIT_BUSY, EXIT_TIMED_OUT])
def test_a_refusal_has_the_arbiters_words_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exit_code: int
) -> None:
    reply = {"status": "error", "reason": "dynamo_VllmWorker is the last; --force", "exit_code": exit_code}
    ScriptedArbiter(reply).install(monkeypatch)
    assert dynamo(monkeypatch, "drain", NAME, "--wait") == exit_code
    captured = capsys.readouterr()
    assert captured.err == "dynamo: dynamo_VllmWorker is the last; --force\n"
    assert captured.out == ""


def test_where_nothing_runs_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "scale", "VllmWorker", "+1") == EXIT_NOT_RUNNING
    assert "nothing runs in namespace 'dynamo'" in capsys.readouterr().err


# --- waiting ---------------------------------------------------------------------------------------


def test_wait_follows_a_new_worker_until_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"{NAME}_1"
    looks = [[], *one(new, "pending", "starting", "starting", pid=None), *one(new, "ready", pid=7)]
    ScriptedArbiter(SPAWNED, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "+1", "--wait") == EXIT_OK
    assert capsys.readouterr().out.splitlines()[2:] == [f"{new}: pending", f"{new}: starting", f"{new}: ready"]


def test_wait_follows_a_drain_until_the_worker_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {"left_requests": 3, "left_tokens": 4120, "eta_s": 12.3, "deadline_s": 588.0}
    gone = f"{NAME}_1"
    looks = [*one(gone, "ready"), *one(gone, "draining", drain=left), *one(gone, "drain_timed_out"), []]
    ScriptedArbiter(DRAINED, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "-1", "--wait") == EXIT_OK
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"{gone}: draining, 3 requests left (4120 tokens), about 12s, at most 9m48s",
        f"{gone}: drain_timed_out",
        f"{gone}: gone",
    ]


@pytest.mark.parametrize("state", ["crashed", "start_timed_out", "backing_off", "faulted"])
def test_a_worker_that_fails_ends_the_wait_with_the_tail_of_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, state: str
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("loading\nCUDA error: out of memory\n")
    failed = one(f"{NAME}_1", state, reason="exited with code 1 unasked", pid=None, log_file=str(log))
    ScriptedArbiter(SPAWNED, [[], *failed]).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "+1", "--wait") == EXIT_FAILED
    assert capsys.readouterr().err == (
        f"dynamo: {NAME}_1 is {state} (exited with code 1 unasked); the end of its log, {log}:\n"
        "  | loading\n  | CUDA error: out of memory\n"
    )


def test_one_that_fails_does_not_end_the_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{NAME}_1", f"{NAME}_2"]
    reply = {**SPAWNED, "instructions": [{"kind": "spawn", "watcher_name": name} for name in names]}
    looks = [
        [],
        [status_row(names[0], "faulted"), status_row(names[1], "starting")],
        [status_row(names[0], "faulted"), status_row(names[1], "ready")],
    ]
    ScriptedArbiter(reply, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "+2", "--wait") == EXIT_FAILED
    captured = capsys.readouterr()
    assert f"{names[1]}: ready" in captured.out
    assert "(it wrote nothing)" in captured.err


@pytest.mark.parametrize(
    ("reply", "look", "told"),
    [
        (SPAWNED, [], "was removed before it was ready"),
        (SPAWNED, [status_row(f"{NAME}_1", "exited")], "was taken back before it was ready"),
        (DRAINED, [status_row(f"{NAME}_1", "ready")], "serves on: its drain was taken back"),
    ],
)
def test_somebody_elses_change_of_mind_is_a_failure_in_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reply: dict[str, Any],
    look: list[dict[str, Any]],
    told: str,
) -> None:
    ScriptedArbiter(reply, [[status_row(f"{NAME}_1")], look]).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "1", "--wait") == EXIT_FAILED
    assert told in capsys.readouterr().err


def test_a_name_that_is_taken_again_at_once_was_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [*one(f"{NAME}_1", "ready", pid=1), *one(f"{NAME}_1", "starting", pid=2)]
    ScriptedArbiter(DRAINED, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "-1", "--wait") == EXIT_OK


def test_a_cancelled_drain_is_waited_for_until_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = one(NAME, "draining", "draining", "ready")
    ScriptedArbiter({"watcher_name": NAME, "state": "draining"}, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "drain", NAME, "--cancel", "--wait") == EXIT_OK


def test_a_rolling_restart_is_waited_for_through_every_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = NAME, f"{NAME}_1"

    def both(first: tuple[str, int | None], second: tuple[str, int | None]) -> list[dict[str, Any]]:
        return [status_row(a, first[0], pid=first[1]), status_row(b, second[0], pid=second[1])]

    looks = [
        both(("ready", 1), ("faulted", None)),
        both(("draining", 1), ("faulted", None)),
        both(("exited", None), ("faulted", None)),
        both(("ready", 3), ("faulted", None)),
        both(("ready", 3), ("pending", None)),
        both(("ready", 3), ("ready", 4)),
    ]
    arbiter = ScriptedArbiter({"workers": [a, b]}, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "restart", "VllmWorker", "--rolling", "--wait") == EXIT_OK
    assert len(arbiter.looks) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(": ready")] == [
        f"{a}: ready",
        f"{b}: ready",
    ]


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        ([status_row(f"{NAME}_1", "ready", pid=2)], EXIT_OK, f"{NAME}: gone"),
        ([status_row(NAME, "ready", pid=1)], EXIT_FAILED, f"{NAME} still has its old process: {NAME}_1 failed first"),
    ],
)
def test_the_only_worker_goes_when_its_substitute_is_ready(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: list[dict[str, Any]],
    code: int,
    told: str,
) -> None:
    old, new = status_row(NAME, "ready", pid=1), status_row(f"{NAME}_1", "starting", pid=2)
    leaving = [status_row(NAME, "draining", pid=1), status_row(f"{NAME}_1", "ready", pid=2)]
    looks = [[old], [old, new], *([leaving] if code == EXIT_OK else []), last]
    ScriptedArbiter({"workers": [NAME], "substitutes": {NAME: f"{NAME}_1"}}, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "restart", NAME, "--wait") == code
    out, err = capsys.readouterr()
    assert f"{NAME}_1 is started first, and takes the place of {NAME}" in out
    assert told in out + err


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([("draining", 1), ("exited", None), ("crashed", None)], "is crashed"),
        ([("draining", 1), ("ready", 1)], "its restart was taken back"),
    ],
)
def test_a_restart_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    states: list[tuple[str, int | None]],
    told: str,
) -> None:
    looks = [[status_row(NAME, state, pid=pid)] for state, pid in [("ready", 1), *states]]
    ScriptedArbiter({"workers": [NAME]}, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "restart", NAME, "--wait") == EXIT_FAILED
    assert told in capsys.readouterr().err


def test_a_restart_that_stops_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workers behind the one that failed keep what they run; the arbiter does not go on to them."""
    a, b = NAME, f"{NAME}_1"
    looks = [
        [status_row(a, "ready", pid=1), status_row(b, "ready", pid=2)],
        [status_row(a, "faulted", pid=None), status_row(b, "ready", pid=2)],
    ]
    ScriptedArbiter({"workers": [a, b]}, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "restart", "VllmWorker", "--wait") == EXIT_FAILED
    assert capsys.readouterr().err.endswith(f"\n{b} still has its old process: {a} failed first\n")


def test_past_its_time_the_wait_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {"left_requests": 1, "left_tokens": None, "eta_s": None, "deadline_s": None}
    looks = [*one(f"{NAME}_1", "ready"), *one(f"{NAME}_1", "draining", drain=left)]
    ScriptedArbiter(DRAINED, looks).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "-1", "--wait", "--timeout", "0.02") == EXIT_TIMED_OUT
    assert capsys.readouterr().err == (
        f"dynamo: not done within 0.02 s: {NAME}_1 is draining, 1 request left. "
        "It goes on; `dynamo status` shows how far it is\n"
    )


def test_an_arbiter_that_leaves_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dynamo down` while somebody waits."""
    ScriptedArbiter(DRAINED, [*one(f"{NAME}_1", "ready", "draining"), None]).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "-1", "--wait") == EXIT_NOT_RUNNING


def test_json_and_wait_keep_stdout_to_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ScriptedArbiter(SPAWNED, [[], *one(f"{NAME}_1", "starting", "crashed")]).install(monkeypatch)
    assert dynamo(monkeypatch, "scale", "VllmWorker", "+1", "--wait", "--json") == EXIT_FAILED
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {**SPAWNED, "outcomes": {f"{NAME}_1": "is crashed"}}
    assert f"{NAME}_1: starting" in captured.err
