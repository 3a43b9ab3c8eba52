"""A full disk, a file that somebody edits, a flood of commands, commands that come too late: the arbiter serves on.

What else goes wrong around us has its tests elsewhere: etcd and NATS in `serve/test_serve_infra_faults.py`, stopped
workers in `serve/test_serve_worker_faults.py` and `scaling/test_scaling_faults.py`; docs/lessons.md lists them all.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.errors import StateError
from dynamo_local.serve.processes import is_alive
from dynamo_local.state import load
from tests.fakes.scaled import command, events, kinds
from tests.fakes.served import Served, auntil, until
from tests.integration.faults.conftest import ECHO

pytestmark = pytest.mark.infra

DISK_BYTES = 2 * 1024 * 1024
COMMANDS = 100
PATIENCE_S = 30.0


# --- the disk ------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of its own, of two MiB; False where we may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def no_room(folder: Path, arbiter: psutil.Process, *, mounted: bool) -> Iterator[None]:
    """Nothing can be written there by the arbiter: the disk is full, or (without one) no file of its may grow."""
    if not mounted:
        soft, hard = arbiter.rlimit(psutil.RLIMIT_FSIZE)
        arbiter.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
        yield
        arbiter.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))
        return
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):  # to the last byte
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    yield
    filler.unlink()


def test_a_full_disk_stops_nothing_and_is_made_good(tmp_path: Path) -> None:
    """Commands are carried out, the status says what cannot be written, and with room the file is right again."""
    folder = tmp_path / "disk"
    with (
        small_disk(folder) as mounted,
        Served(
            *("--gpus", "sim:8", "--Echo.ServiceArgs.workers=3"),
            target=("echo:Echo",),
            files={"echo.py": ECHO},
            frontend=False,
            env={"DYN_LOCAL_STATE_DIR": str(folder)},
        ) as served,
    ):
        served.start()
        pids = served.pids()
        before = served.paths.statefile.read_bytes()
        arbiter = psutil.Process(served.status()["arbiter_pid"])
        with no_room(folder, arbiter, mounted=mounted):
            command(served, "drain", name="dynamo_Echo_2")
            until(lambda: "Echo_2" not in served.states(), PATIENCE_S, what=served.states)
            notes = until(lambda: [n for n in served.status()["notes"] if "cannot be written" in n], PATIENCE_S)
            assert "dynamo_Echo_2" in load(served.paths.statefile).components, "the old file, and valid"
            assert json.loads(served.paths.statefile.read_bytes()).keys() == json.loads(before).keys()
        until(lambda: set(load(served.paths.statefile).components) == {"dynamo_Echo", "dynamo_Echo_1"}, PATIENCE_S)
        command(served, "scale", component="Echo", target="+1")
        until(lambda: served.states().get("Echo_2") == "ready", PATIENCE_S, what=served.states)

        assert "it is tried again" in notes[0]
        assert {name: pid for name, pid in served.pids().items() if name != "Echo_2"} == {
            name: pid for name, pid in pids.items() if name != "Echo_2"
        }
        assert served.status()["arbiter_pid"] == arbiter.pid
        assert kinds(events(served, "Echo_2"))[-1] == "Registered", "what was not logged in time was logged later"
        served.down()


# --- the statefile -------------------------------------------------------------------------------


def _truncated(text: str) -> str:
    return text[: len(text) // 2]


def _of_another(text: str) -> str:
    return text.replace('"namespace": "dynamo"', '"namespace": "other"')


def _without_a_worker(text: str) -> str:
    state = json.loads(text)
    del state["components"]["dynamo_Echo_1"]
    return json.dumps(state)


@pytest.mark.parametrize(
    ("edit", "aside"),
    [(_truncated, True), (_of_another, True), (_without_a_worker, False)],
    ids=lambda value: str(value),
)
async def test_a_statefile_that_is_edited_while_it_runs_is_put_right(
    echo: Served, edit: Callable[[str], str], aside: bool
) -> None:
    """What cannot be read is kept beside; what the arbiter knows is written; workers do not notice."""
    path, pids = echo.paths.statefile, echo.pids()
    kept = set(path.parent.glob("*.corrupt-*"))
    right = load(path).components
    broken = edit(path.read_text())
    path.write_text(broken)

    await auntil(lambda: _readable(path) == right.keys(), PATIENCE_S, what=path.read_text)

    new = set(path.parent.glob("*.corrupt-*")) - kept
    assert [file.read_text() for file in new] == ([broken] if aside else [])
    entries = load(path).components
    assert {name: (e.pid, e.lease, e.endpoints) for name, e in entries.items()} == {
        name: (e.pid, e.lease, e.endpoints) for name, e in right.items()
    }
    assert echo.pids() == pids
    assert set(echo.states().values()) == {"ready"}


def _readable(path: Path) -> object:
    try:
        state = load(path)
    except StateError:
        return None
    return state.components.keys() if state.namespace == "dynamo" else None


# --- commands ------------------------------------------------------------------------------------


async def test_a_hundred_commands_at_once_are_all_answered(echo: Served) -> None:
    """Each is carried out or refused with a reason; the fleet ends at the last number that was asked for."""
    arbiter = echo.status()["arbiter_pid"]

    def ask(n: int) -> str:
        try:
            if n % 3 == 0:
                command(echo, "scale", component="Echo", target=f"={2 + n % 4}")
            elif n % 3 == 1:
                command(echo, "drain", name=f"dynamo_Echo_{n % 5}")
            else:
                command(echo, "drain", name=f"dynamo_Echo_{n % 5}", cancel=True)
        except ArbiterRefused as refusal:
            return str(refusal.details["code"])
        return "ok"

    with ThreadPoolExecutor(COMMANDS) as pool:
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(*(loop.run_in_executor(pool, ask, n) for n in range(COMMANDS)))
    await asyncio.to_thread(command, echo, "scale", component="Echo", target="=3")
    await auntil(lambda: list(echo.states().values()) == ["ready"] * 3, 60.0, what=echo.states)

    assert set(answers) <= {"ok", "last_ready_worker", "drain_not_cancellable", "unknown_worker", "no_workers"}, answers
    assert "ok" in answers
    assert echo.status()["arbiter_pid"] == arbiter
    assert set(load(echo.paths.statefile).components) == {f"dynamo_{name}" for name in echo.states()}


async def test_a_command_for_a_worker_that_is_already_going_says_so(echo: Served) -> None:
    """Drained twice it drains once; what is gone is named as unknown, with those there are; the graph is the same."""
    await asyncio.to_thread(command, echo, "scale", component="Echo", target="=3")
    await auntil(lambda: echo.states().get("Echo_2") == "ready", PATIENCE_S, what=echo.states)
    worker = psutil.Process(echo.pids()["Echo_2"])
    seen = len(events(echo))
    worker.suspend()  # so that it is still going when it is told again
    try:
        await asyncio.to_thread(command, echo, "drain", name="dynamo_Echo_2")
        await asyncio.to_thread(command, echo, "drain", name="dynamo_Echo_2")
        with pytest.raises(ArbiterRefused, match="is leaving"):
            await asyncio.to_thread(command, echo, "restart", name="dynamo_Echo_2")
        assert echo.states()["Echo_2"] == "draining"
    finally:
        worker.resume()
    await auntil(lambda: "Echo_2" not in echo.states(), PATIENCE_S, what=echo.states)
    with pytest.raises(ArbiterRefused, match="dynamo_Echo_2") as refused:
        await asyncio.to_thread(command, echo, "drain", name="dynamo_Echo_2")

    assert refused.value.details["code"] == "unknown_worker"
    assert kinds(events(echo)[seen:]).count("DrainRequested") == 1
    assert not is_alive(worker.pid)
    assert set(echo.states().values()) == {"ready"}
