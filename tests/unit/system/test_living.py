"""Whether an arbiter lives: its lock or its pid says so, and neither depends on the variables of a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.errors import NamespaceBusy
from dynamo_local.system import liveness as living
from dynamo_local.system import liveness as lock
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import start_time_s


@pytest.fixture
def arbiter() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for one."""
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
    assert living.lives(paths)
    with pytest.raises(NamespaceBusy, match=rf"is run by pid {arbiter.pid} \(as .*ns.json says\)"):
        living.claim(paths, "a second one")
    assert not lock.is_held(paths.lock)


@pytest.mark.parametrize(
    "broken", [{"pid": None}, {"pid": "7"}, {"pid": -1}, {"pid": 0}, {"later_s": 60.0}, {"at": "x"}]
)
def test_a_number_that_was_given_again_is_another_process(
    paths: Paths, arbiter: subprocess.Popen[bytes], broken: dict[str, object]
) -> None:
    started_s = (start_time_s(arbiter.pid) or 0.0) + float(str(broken.get("later_s", 0.0)))
    record(paths, broken.get("pid", arbiter.pid), broken.get("at", started_s))
    assert not living.lives(paths)
    lock.release(living.claim(paths, "a successor"))


def test_a_lock_is_held_by_who_lives_also_without_a_statefile(paths: Paths) -> None:
    held = living.claim(paths, "the first")
    try:
        assert living.lives(paths)
        assert living.who(paths) == f"pid {os.getpid()} (the first)"
    finally:
        lock.release(held)
    assert not living.lives(paths)
