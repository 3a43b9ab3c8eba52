"""A host that refuses `dynamo serve` a folder, a file, a descriptor or a process: one line, exit code 1, no traces."""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dynamo_local.system.paths import Paths
from tests.drivers.served import Served, until
from tests.integration.faults.conftest import ECHO

pytestmark = pytest.mark.infra

REFUSING = "/sys/dynamo-local"
"""Nobody may make a folder there, root included."""


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


NO_FOLDER: Mapping[str, str] = {
    "DYN_LOCAL_LOG_DIR": "a folder of ours cannot be made: /sys/dynamo-local",
    "DYN_LOCAL_STATE_DIR": "/sys/dynamo-local cannot be used for statefiles",
    "XDG_RUNTIME_DIR": "a folder of ours cannot be made: /sys/dynamo-local",
}


@pytest.mark.parametrize(
    ("variable", "detached"), [("DYN_LOCAL_LOG_DIR", False), ("DYN_LOCAL_STATE_DIR", False), ("XDG_RUNTIME_DIR", True)]
)
def test_a_folder_that_cannot_be_made(variable: str, detached: bool) -> None:
    with _echo(env={variable: REFUSING}) as served:
        words = served.serve_words("--detach") if detached else served.serve_words()
        line = _refused(served, *words)
        assert NO_FOLDER[variable] in line
        assert variable in line or "statefiles" in line


def test_no_descriptors() -> None:
    """libzmq would abort, or an import would fail."""
    with _echo() as served:
        line = _refused(served, *served.serve_words(), limit=_limit(resource.RLIMIT_NOFILE, 24))
        assert "only 24 files may be open" in line
        assert "ulimit -n" in line


def test_an_address_space_that_is_too_small() -> None:
    """A library cannot be mapped."""
    with _echo() as served:
        limit = _limit(resource.RLIMIT_AS, 60 << 20)
        assert "`ulimit -v`" in _refused(served, *served.serve_words(), limit=limit)


@pytest.mark.parametrize("mebibytes", [250, *(pytest.param(each, marks=pytest.mark.full) for each in (150, 200, 400))])
def test_the_guardian_ends_what_a_small_address_space_leaves(mebibytes: int) -> None:
    """No thread can start, etcd cannot reserve memory, or the arbiter is aborted: that varies."""
    with _echo() as served:
        done = served.cli(*served.serve_words(), preexec_fn=_limit(resource.RLIMIT_AS, mebibytes << 20))
        assert done.returncode != 0
        until(lambda: not served.leftovers(), what=served.leftovers)
        assert not list(served.folder.rglob("*.owner"))


@pytest.mark.parametrize("size", [0, pytest.param(20, marks=pytest.mark.full)])
def test_a_disk_that_takes_nothing_more(size: int) -> None:
    with _echo() as served:
        assert "File too large" in _refused(served, *served.serve_words(), limit=_limit(resource.RLIMIT_FSIZE, size))


def test_an_embedded_server_that_cannot_be_executed() -> None:
    """circus keeps the system's reason to itself."""
    with _echo() as served:
        folder = served.folder / "bin"
        folder.mkdir()
        (folder / "etcd").write_bytes(b"\x7fELF of another machine")
        (folder / "etcd").chmod(0o755)
        served.env["PATH"] = f"{folder}:{served.env['PATH']}"
        line = _refused(served, *served.serve_words())
        assert "the graph cannot be started: " in line
        assert "Exec format error; it is not a program for this machine" in line


@pytest.fixture
def tiny() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        words = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a small file system")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(("variable", "detached"), [("DYN_LOCAL_STATE_DIR", False), ("XDG_RUNTIME_DIR", True)])
def test_a_folder_without_room(variable: str, detached: bool, tiny: Path) -> None:
    (tiny / "full").write_bytes(b"x" * 4096)
    with _echo(env={variable: str(tiny)}) as served:
        words = served.serve_words("--detach") if detached else served.serve_words()
        assert "No space left on device" in _refused(served, *words)


def test_a_read_only_state_folder_is_named_by_all_who_write_there(tiny: Path) -> None:
    (tiny / "dynamo.json").write_text("{}")
    subprocess.run(["mount", "-o", "remount,ro", str(tiny)], check=True)
    with _echo(env={"DYN_LOCAL_STATE_DIR": str(tiny)}) as served:
        for words in (served.serve_words(), ("down",)):
            assert f"{tiny}/" in (line := _refused(served, *words))
            assert "Read-only file system; choose folders that you may write" in line
        served.env["DYN_LOCAL_STATE_DIR"] = str(served.folder / "state")
        served.paths = Paths.of("dynamo", served.env)


def _echo(env: Mapping[str, str] | None = None) -> Served:
    return Served("--gpus", "sim:2", target=("echo:Echo",), files={"echo.py": ECHO}, frontend=False, env=env)


def _refused(served: Served, *words: str, limit: Callable[[], None] | None = None) -> str:
    """The one line that says why, of a command that fails by exit code 1."""
    done = served.cli(*words, timeout_s=60.0, preexec_fn=limit)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "Traceback" not in output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dynamo: ")]
    assert not Path(REFUSING).exists()
    return line
