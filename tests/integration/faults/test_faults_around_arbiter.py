"""A full disk, a file that somebody edits, a flood of commands, commands that come too late: the arbiter serves on.

Other faults have their tests elsewhere: etcd and NATS in `serve/test_serve_infra_faults.py`, stopped
workers in `serve/test_serve_worker_faults.py` and `scaling/test_scaling_faults.py`; docs/lessons.md lists them all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.errors import StateError
from dynamo_local.state.store import load
from dynamo_local.system.host_errors import DESCRIPTORS_RAISED_TO
from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import command, events, kinds
from tests.drivers.served import Served, auntil, until
from tests.integration.faults.conftest import ECHO
from tests.tools.alone import alone
from tests.tools.host_faults import full_disk, small_disk

pytestmark = pytest.mark.infra

DISK_BYTES = 2 * 1024 * 1024
COMMANDS = 100
PATIENCE_S = 30.0


@contextmanager
def no_room(folder: Path, arbiter: psutil.Process, *, mounted: bool) -> Iterator[None]:
    """Nothing can be written there by the arbiter: the disk is full, or (without one) no file of its may grow."""
    if not mounted:
        soft, hard = arbiter.rlimit(psutil.RLIMIT_FSIZE)
        arbiter.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
        yield
        arbiter.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))
        return
    with full_disk(folder):
        yield


def test_a_full_disk_stops_nothing_and_is_made_good(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with (
        small_disk(folder, DISK_BYTES) as mounted,
        Served(
            *("--gpus", "sim:8", "--Echo.ServiceArgs.workers=3"),
            target=("echo:Echo",),
            files={"echo.py": ECHO},
            frontend=False,
            env={"DYN_LOCAL_STATE_DIR": str(folder)},
        ).started() as served,
    ):
        pids = served.pids()
        before = served.paths.statefile.read_bytes()
        arbiter = psutil.Process(served.status()["arbiter_pid"])
        with no_room(folder, arbiter, mounted=mounted):
            command(served, "drain", name="dynamo_Echo_2")
            until(lambda: "Echo_2" not in served.states(), PATIENCE_S, what=served.states)
            notes = until(lambda: _unwritten(served), PATIENCE_S)
            assert "dynamo_Echo_2" in load(served.paths.statefile).components, "the old file, and valid"
            assert json.loads(served.paths.statefile.read_bytes()).keys() == json.loads(before).keys()
        until(lambda: set(load(served.paths.statefile).components) == {"dynamo_Echo", "dynamo_Echo_1"}, PATIENCE_S)
        command(served, "scale", component="Echo", target="+1")
        until(lambda: served.states().get("Echo_2") == "ready", PATIENCE_S, what=served.states)
        assert "it is tried again" in notes[0]["text"]
        assert _unwritten(served) == [], "the note has gone with its cause"
        assert {name: pid for name, pid in served.pids().items() if name != "Echo_2"} == {
            name: pid for name, pid in pids.items() if name != "Echo_2"
        }
        assert served.status()["arbiter_pid"] == arbiter.pid
        logged = partial(events, served, "Echo_2")
        until(lambda: kinds(logged())[-1] == "Registered", PATIENCE_S, what=logged)  # a thread writes the log
        served.down()


def _unwritten(served: Served) -> list[dict[str, Any]]:
    return [note for note in served.status()["notes"] if "the statefile cannot be written" in note["text"]]


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
    ids=["truncated", "of_another", "without_a_worker"],
)
async def test_a_statefile_that_is_edited_while_it_runs_is_put_right(
    echo: Served, edit: Callable[[str], str], aside: bool
) -> None:
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


def _asked(served: Served, name: str, /, **properties: Any) -> str:
    try:
        command(served, name, **properties)
    except ArbiterRefused as refusal:
        return str(refusal.details["code"])
    return "ok"


async def test_a_hundred_commands_at_once_are_all_answered(echo: Served) -> None:
    arbiter = echo.status()["arbiter_pid"]

    def ask(n: int) -> str:
        if n % 3 == 0:
            return _asked(echo, "scale", component="Echo", target=f"={2 + n % 4}")
        return _asked(echo, "drain", name=f"dynamo_Echo_{n % 5}", **({"cancel": True} if n % 3 == 2 else {}))

    with ThreadPoolExecutor(COMMANDS) as pool:
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(*(loop.run_in_executor(pool, ask, n) for n in range(COMMANDS)))

    def three() -> bool:
        """Asked again: a worker whose last drain is being taken back just now counts as one that leaves."""
        asked = _asked(echo, "scale", component="Echo", target="=3")
        return asked == "ok" and list(echo.states().values()) == ["ready"] * 3

    await auntil(three, 60.0, what=lambda: events(echo)[-40:])
    refusals = {"last_ready_worker", "drain_not_cancellable", "unknown_worker", "no_workers", "not_enough_gpus"}
    assert set(answers) <= {"ok", *refusals}, answers
    assert "ok" in answers
    assert echo.status()["arbiter_pid"] == arbiter
    assert set(load(echo.paths.statefile).components) == {f"dynamo_{name}" for name in echo.states()}


async def test_a_command_for_a_worker_that_is_already_going_says_so(echo: Served) -> None:
    await asyncio.to_thread(command, echo, "scale", component="Echo", target="=3")
    await auntil(lambda: list(echo.states().values()) == ["ready"] * 3, PATIENCE_S, what=echo.states)
    last = max(echo.states())  # which names there are depends on the tests before
    worker = psutil.Process(echo.pids()[last])
    seen = len(events(echo))
    worker.suspend()  # so that it is still going when it is told again
    try:
        await asyncio.to_thread(command, echo, "drain", name=f"dynamo_{last}")
        await asyncio.to_thread(command, echo, "drain", name=f"dynamo_{last}")
        with pytest.raises(ArbiterRefused, match="is leaving"):
            await asyncio.to_thread(command, echo, "restart", name=f"dynamo_{last}")
        assert echo.states()[last] == "draining"
    finally:
        worker.resume()
    await auntil(lambda: last not in echo.states(), PATIENCE_S, what=echo.states)
    with pytest.raises(ArbiterRefused, match=f"dynamo_{last}") as refused:
        await asyncio.to_thread(command, echo, "drain", name=f"dynamo_{last}")
    assert refused.value.details["code"] == "unknown_worker"
    assert kinds(events(echo)[seen:]).count("DrainRequested") == 1
    assert not is_alive(worker.pid)
    await auntil(lambda: set(echo.states().values()) == {"ready"}, PATIENCE_S, what=echo.states)


@pytest.mark.full
def test_a_worker_that_is_started_while_the_arbiter_may_open_few_files_may_open_more() -> None:
    with alone().started() as served:
        arbiter = psutil.Process(served.status()["arbiter_pid"])
        _, hard = arbiter.rlimit(psutil.RLIMIT_NOFILE)
        arbiter.rlimit(psutil.RLIMIT_NOFILE, (300, hard))
        assert served.cli("scale", "VllmWorker", "+1", "--wait").returncode == 0
        worker = psutil.Process(served.worker("VllmWorker_1")["pid"])
        assert worker.rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, DESCRIPTORS_RAISED_TO)
