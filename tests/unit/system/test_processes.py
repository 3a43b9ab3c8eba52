"""Processes of this host: sessions, liveness, endings, locks, descriptors and environments."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.errors import NamespaceBusy
from dynamo_local.system import liveness, processes
from dynamo_local.system.descriptors import SPARE, ReservedDescriptors
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import aend_session, is_alive, session_members, start_time_s, wait_exit
from tests.drivers.served import auntil
from tests.fakes.arbiter.told import Told

FAMILY = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """The pids of a session's leader and of its child."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        yield leader.pid, child
        leader.kill()


def test_the_end_of_a_process_is_told_to_those_who_are_not_its_parent() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        pidfd = os.pidfd_open(process.pid)
        assert processes.exit_status(process.pid, pidfd) is None, "it runs"
        process.kill()
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        zombie = processes.exit_status(process.pid, pidfd)
    told = processes.exit_status(process.pid, pidfd)  # its parent has waited for it: Linux 6.15 still tells
    os.close(pidfd)
    assert zombie == signal.SIGKILL
    assert told in (signal.SIGKILL, None)


@pytest.mark.parametrize(
    ("status", "oom_kills", "words"),
    [
        (9, (3, 3), "was killed by SIGKILL"),
        (9, (None, 4), "was killed by SIGKILL"),
        (9, (3, 4), "was killed by SIGKILL, while the kernel's OOM killer was at work (`dmesg` names its victims)"),
        (11, (3, 4), "was killed by SIGSEGV"),
        (0x100, (3, 4), "ended with exit code 1"),
        (None, (3, 3), "was killed (by what is not known)"),
    ],
)
def test_the_end_of_a_process_in_words(status: int | None, oom_kills: tuple[int | None, int], words: str) -> None:
    assert processes.ended_how(status, *oom_kills) == words


async def test_the_whole_session_is_ended(family: tuple[int, int]) -> None:
    """A child that its leader leaves behind would keep its GPU."""
    leader, child = family
    assert set(await aend_session(leader)) == {leader, child}
    assert await wait_exit(leader, 10.0)
    await auntil(lambda: not is_alive(child), 10.0)
    assert list(session_members(leader)) == []
    assert await aend_session(leader) == []


async def test_it_looks_through_proc_in_a_thread(family: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of processes that takes tens of milliseconds, in which no command would be answered."""
    looked_in: list[int] = []

    def members(session: int) -> list[int]:
        looked_in.append(threading.get_ident())
        return []

    monkeypatch.setattr(processes, "session_members", members)
    await aend_session(family[0])
    assert looked_in
    assert threading.get_ident() not in looked_in


async def test_where_proc_hangs_leader_and_group_are_killed_all_the_same(
    family: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading the command line of a process that hangs in the kernel may hang, too: `down --now` ends what it can."""
    leader, child = family
    free = threading.Event()

    def hangs(session: int) -> list[int]:
        free.wait()
        return []

    monkeypatch.setattr(processes, "session_members", hangs)
    assert await aend_session(leader, deadline_s=0.05) == [leader]
    assert await wait_exit(leader, 10.0)
    await auntil(lambda: not is_alive(child), 10.0)
    assert "only its leader and its process group are killed" in caplog.text
    free.set()


# --- living
# Whether an arbiter lives: its lock or its pid says so, and neither depends on the variables of a shell.


@pytest.fixture
def arbiter() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Of a namespace whose state folder is there."""
    paths = Paths.of("ns", {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)})
    paths.statefile.parent.mkdir(parents=True)
    return paths


def record(paths: Paths, pid: object, started_s: object) -> None:
    """A statefile that names this arbiter."""
    raw = {"run_id": "R", "arbiter_pid": pid, "arbiter_start_time": started_s}
    paths.statefile.write_text(json.dumps(raw))


def test_a_recorded_process_lives_without_its_lock(paths: Paths, arbiter: subprocess.Popen[bytes]) -> None:
    """Its lock is another release's, or was deleted: the namespace is refused all the same, and left as it is."""
    record(paths, arbiter.pid, start_time_s(arbiter.pid))
    assert liveness.lives(paths)
    with pytest.raises(NamespaceBusy, match=rf"is run by pid {arbiter.pid} \(as .*ns.json says\)"):
        liveness.claim(paths, "a second one")
    assert not liveness.is_held(paths.lock)


@pytest.mark.parametrize(
    "broken", [{"pid": None}, {"pid": "7"}, {"pid": -1}, {"pid": 0}, {"later_s": 60.0}, {"at": "x"}]
)
def test_a_number_that_was_given_again_is_another_process(
    paths: Paths, arbiter: subprocess.Popen[bytes], broken: dict[str, object]
) -> None:
    started_s = (start_time_s(arbiter.pid) or 0.0) + float(str(broken.get("later_s", 0.0)))
    record(paths, broken.get("pid", arbiter.pid), broken.get("at", started_s))
    assert not liveness.lives(paths)
    liveness.release(liveness.claim(paths, "a successor"))


def test_a_lock_is_held_by_who_lives_also_without_a_statefile(paths: Paths) -> None:
    held = liveness.claim(paths, "the first")
    try:
        assert liveness.lives(paths)
        assert liveness.who(paths) == f"pid {os.getpid()} (the first)"
    finally:
        liveness.release(held)
    assert not liveness.lives(paths)


# --- ending
# `ending.end_at_the_latest` in processes of their own: one that is done ends, whatever Python waits for.

WAITS = {
    "a thread": """
        threading.Thread(target=lambda: time.sleep(3600), name="forgotten").start()
        end_at_the_latest(7, within_s=0.2)
    """,
    "a task": """
        async def deaf():
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)

        async def main():
            task = asyncio.create_task(deaf(), name="forgotten")
            await asyncio.sleep(0)
            end_at_the_latest(7, within_s=0.2)

        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS.keys())
def test_a_process_that_python_would_keep_ends_and_says_what_was_left(waits: str) -> None:
    done = run(waits)
    assert done.returncode == 7
    assert "forgotten" in done.stderr


def test_a_process_that_ends_by_itself_says_nothing() -> None:
    done = run("end_at_the_latest(7, within_s=3600)")
    assert (done.returncode, done.stderr) == (0, "")


def run(code: str) -> subprocess.CompletedProcess[str]:
    imports = (
        "import asyncio, contextlib, threading, time\nfrom dynamo_local.system.executors import end_at_the_latest\n"
    )
    program = imports + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


# --- namespace lock
# One arbiter per namespace.


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "ns.lock"
    script = (
        "import sys, pathlib; from dynamo_local.system import liveness\n"
        "held = liveness.acquire(pathlib.Path(sys.argv[1]), 'ns', 'the first')\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        assert liveness.is_held(path)
        with pytest.raises(NamespaceBusy, match=rf"pid {first.pid} \(the first\).*dynamo down"):
            liveness.acquire(path, "ns", "the second")
        first.kill()
        first.wait()
    assert not liveness.is_held(path)
    held = liveness.acquire(path, "ns", "the third")
    liveness.release(held)
    assert not liveness.is_held(path)


def test_nothing_is_held_where_there_is_no_file(tmp_path: Path) -> None:
    assert not liveness.is_held(tmp_path / "none.lock")
    assert list(tmp_path.iterdir()) == []


# --- spare descriptors
# A few file descriptors are kept for when there are no others, and taken back when there are.


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def spare(told: Told) -> Iterator[ReservedDescriptors]:
    spare = ReservedDescriptors(told)
    yield spare
    spare.close()


def _free() -> int:
    """The number that the next descriptor gets."""
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def test_they_are_let_go_when_there_are_no_others_and_taken_back(spare: ReservedDescriptors, told: Told) -> None:
    """A limit at what the process has now; then as it was. Each is told once, however often it looks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert spare.held == SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (_free(), hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        spare.look()
        spare.look()
        os.close(os.dup(0))
        without, notes = spare.held, told.notes
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    spare.look()
    spare.look()

    assert (without, spare.held) == (0, SPARE)
    assert ["no file descriptors left" in told[0], told[1:]] == [True, ["there are file descriptors again"]]
    assert (notes, told.notes) == (told[:1], []), "the note is gone with its cause"


def test_while_there_are_enough_nothing_is_told(spare: ReservedDescriptors, told: Told) -> None:
    before = _free()
    spare.look()
    assert (spare.held, _free(), told) == (SPARE, before, [])


# --- own environment
# A process that gets another environment: what Python, the C library and /proc then say. In a process of its own.

_PROGRAM = """
import ctypes, json, os, sys
from dynamo_local.system import processes as own_environment
env, marks, secret, argv = json.loads(sys.stdin.read())
error = None
try:
    own_environment.become(env, marks=marks, secret=secret, argv=argv)
except OSError as caught:
    error = str(caught)
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
read = lambda name: open(f"/proc/self/{name}").read().split(chr(0))
child = os.popen("env").read().splitlines()
print(json.dumps({
    "error": error, "os": dict(os.environ),
    "c": {n: (libc.getenv(n.encode()) or b"").decode() for n in ("A", "B", "OLD")},
    "environ": [e for e in read("environ") if e], "cmdline": [w for w in read("cmdline") if w], "child": child,
}))
"""


def became(env: dict[str, str], *, start: dict[str, str], marks: list[str], secret: list[str], argv: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "." * 200],
        input=json.dumps([env, marks, secret, argv]),
        env=start,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict = json.loads(done.stdout)
    return found


START = {"A": "1", "OLD": "x", "ROOM": "." * 400, "PATH": "/usr/bin:/bin"}


def test_nothing_of_the_former_environment_is_left_anywhere() -> None:
    env = {"A": "1", "B": "2", "PATH": "/usr/bin:/bin", "MARK": "me"}
    found = became(env, start=START, marks=["MARK"], secret=[], argv=["worker", "--name", "x"])
    assert found["error"] is None
    assert found["os"] == env
    assert found["c"] == {"A": "1", "B": "2", "OLD": ""}
    assert found["environ"] == ["MARK=me", "A=1", "B=2", "PATH=/usr/bin:/bin"]
    assert found["cmdline"] == ["worker", "--name", "x"]
    assert {"B=2", "MARK=me"} <= set(found["child"])
    assert not any(line.startswith("OLD=") for line in found["child"])


def test_proc_shows_no_secret_and_leaves_out_what_does_not_fit() -> None:
    env = {"MARK": "me", "B": "y" * 5000, "HF_TOKEN": "hush", "PATH": "/usr/bin:/bin"}
    found = became(env, start=START, marks=["MARK"], secret=["HF_TOKEN"], argv=["worker"])
    assert found["environ"] == ["MARK=me", "PATH=/usr/bin:/bin"]
    assert found["os"] == env


def test_marks_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    found = became({"MARK": "m" * 5000}, start=START, marks=["MARK"], secret=[], argv=["worker"])
    assert "need" in found["error"]
    assert found["os"]["OLD"] == "x"
    assert "OLD=x" in found["environ"]
