"""One arbiter per namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.errors import NamespaceBusy
from dynamo_local.system import liveness as lock


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "ns.lock"
    script = (
        "import sys, pathlib; from dynamo_local.system import liveness as lock\n"
        "held = lock.acquire(pathlib.Path(sys.argv[1]), 'ns', 'the first'); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        assert lock.is_held(path)
        with pytest.raises(NamespaceBusy, match=rf"pid {first.pid} \(the first\).*dynamo down"):
            lock.acquire(path, "ns", "the second")
        first.kill()
        first.wait()
    assert not lock.is_held(path)
    held = lock.acquire(path, "ns", "the third")
    lock.release(held)
    assert not lock.is_held(path)


def test_nothing_is_held_where_there_is_no_file(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "none.lock")
    assert list(tmp_path.iterdir()) == []
