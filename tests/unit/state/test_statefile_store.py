"""The store: nothing lost, nothing torn, nothing that is not ours removed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from dynamo_local.errors import StateError
from dynamo_local.state.raw import StateMissing, read_raw
from dynamo_local.state.schema import ComponentEntry, EntryResources, State
from dynamo_local.state.store import Removal, StateStore

RUN, OTHER_RUN = "01JD3YQZ8E6W4T1V0K2M5N7P9R", "01JD3YQZ8E6W4T1V0K2M5N7P9S"
NAME = "dynamo_VllmWorker"


def state(run_id: str = RUN, workers: int = 1) -> State:
    names = ["dynamo_VllmWorker", *(f"dynamo_VllmWorker_{n}" for n in range(1, workers))]
    entries = {name: ComponentEntry(watcher_name=name, component="VllmWorker") for name in names}
    return State(namespace="dynamo", run_id=run_id, components=entries)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    store = StateStore(tmp_path / "state" / "dynamo.json")
    store.create(state())
    return store


def test_a_change_is_committed(store: StateStore) -> None:
    with store.transaction() as current:
        current.components[NAME].lease = "694d967da694ea1a"
    assert store.read().components[NAME].lease == "694d967da694ea1a"


def test_a_failed_block_changes_nothing(store: StateStore) -> None:
    before = store.path.read_bytes()

    def fail(current: State) -> None:
        current.components.clear()
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        store.update(fail)
    assert store.path.read_bytes() == before
    store.update(lambda current: None)


def test_an_invalid_change_is_refused_before_it_is_written(store: StateStore) -> None:

    def wrong_type(current: State) -> None:
        current.components[NAME].pid = "4711"  # type: ignore[assignment]

    def two_holders(current: State) -> None:
        for name in (f"{NAME}_1", f"{NAME}_2"):
            resources = EntryResources(gpu_uuids=["GPU-x"])
            current.components[name] = ComponentEntry(watcher_name=name, component="VllmWorker", resources=resources)

    before = store.path.read_bytes()
    with pytest.raises(StateError, match=f"{NAME}.pid: Input should be a valid integer"):
        store.update(wrong_type)
    with pytest.raises(StateError, match="GPU-x is held by"):
        store.update(two_holders)
    assert store.path.read_bytes() == before


def test_a_transaction_that_changes_nothing_writes_nothing(store: StateStore) -> None:
    """Reading under the lock costs no fsync: each write would be another file of that name."""
    before = store.path.stat()
    assert store.update(lambda current: current.components[NAME].component) == "VllmWorker"
    assert (store.path.stat().st_ino, store.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_an_update_from_the_loop_runs_in_a_thread(store: StateStore) -> None:
    """The event loop is not blocked by the commit, and many at once lose nothing."""
    threads = set()

    def bump(current: State) -> int:
        threads.add(threading.current_thread())
        current.components[NAME].restarts += 1
        return current.components[NAME].restarts

    results = await asyncio.gather(*(store.aupdate(bump) for _ in range(20)))
    assert sorted(results) == list(range(1, 21))
    assert threading.main_thread() not in threads


INCREMENTER = """
import sys
from pathlib import Path
from dynamo_local.state.store import StateStore
store = StateStore(Path(sys.argv[1]), lock_timeout_s=30)
for _ in range(int(sys.argv[2])):
    with store.transaction() as state:
        state.components["dynamo_VllmWorker"].restarts += 1
"""


def incrementer(store: StateStore, times: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", INCREMENTER, str(store.path), str(times)])


def test_two_processes_lose_no_update(store: StateStore) -> None:
    """One lock spans read and write, so 2 x 60 increments are 120."""
    writers = [incrementer(store, 60) for _ in range(2)]
    assert [writer.wait(50) for writer in writers] == [0, 0]
    assert store.read().components[NAME].restarts == 120


def test_a_reader_never_sees_a_torn_file(tmp_path: Path) -> None:
    """Without a lock, beside a writer of a large file, every read is whole, valid and not older."""
    store = StateStore(tmp_path / "dynamo.json")
    store.create(state(workers=64))
    writer = incrementer(store, 60)
    reads, last = 0, 0
    try:
        while writer.poll() is None:
            restarts = read_raw(store.path)["components"][NAME]["restarts"]
            assert restarts >= last
            reads, last = reads + 1, restarts
    finally:
        writer.kill()
        writer.wait(5)
    assert writer.returncode == 0
    assert reads > 20


KILLED = """
import os, signal, sys
from pathlib import Path
from dynamo_local.state.store import StateStore

replace = Path.replace

def die(source, target):
    if sys.argv[2] == "after replace":
        replace(source, target)
    os.kill(os.getpid(), signal.SIGKILL)

Path.replace = die
with StateStore(Path(sys.argv[1])).transaction() as state:
    state.components["dynamo_VllmWorker"].restarts = 7
"""


@pytest.mark.parametrize(("moment", "restarts"), [("before replace", 0), ("after replace", 7)])
def test_a_crash_in_the_commit_leaves_the_old_or_the_new_file(store: StateStore, moment: str, restarts: int) -> None:
    """Killed between the temporary file and the replace, or after it; the lock is free either way."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.path), moment], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.read().components[NAME].restarts == restarts
    store.update(lambda current: current.components[NAME].__setattr__("restarts", 9))
    assert store.read().components[NAME].restarts == 9
    assert visible(store) == ["dynamo.json"]


def visible(store: StateStore) -> list[str]:
    """Files in the folder, our own hidden lock aside."""
    return sorted(path.name for path in store.path.parent.iterdir() if not path.name.endswith(".lock"))


def test_a_full_disk_leaves_the_old_file(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = store.path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(StateError, match="cannot be written: No space left on device; the previous version is kept"),
        store.transaction() as current,
    ):
        current.components[NAME].restarts = 1
    assert store.path.read_bytes() == before


def test_the_wait_for_the_lock_has_a_deadline(store: StateStore) -> None:
    """Another process that sits on the lock gives a named outcome, not a hang."""
    impatient = StateStore(store.path, lock_timeout_s=0.05)
    with (
        FileLock(store.path.with_name(".dynamo.json.lock")),
        pytest.raises(StateError, match=r"locked by another process for 0\.05 s"),
        impatient.transaction(),
    ):
        pass


def test_threads_that_wait_have_the_same_deadline(store: StateStore) -> None:
    impatient = StateStore(store.path, lock_timeout_s=0.05)
    with impatient.transaction(), pytest.raises(StateError, match="was locked"), impatient.transaction():
        pass


def test_only_our_own_file_is_removed(store: StateStore) -> None:
    """Leaving takes this namespace's file alone; another namespace's stays, and so does the folder."""
    sibling = StateStore(store.path.with_name("other.json"))
    sibling.create(State(namespace="other", run_id=OTHER_RUN))
    assert store.remove_if_owned(RUN) is Removal.REMOVED
    assert visible(store) == ["other.json"]
    assert store.remove_if_owned(RUN) is Removal.ABSENT


def test_a_file_of_another_run_is_not_removed(store: StateStore) -> None:
    """A late leaver finds its successor's file and leaves it."""
    store.rewrite(state(OTHER_RUN))
    assert store.remove_if_owned(RUN) is Removal.NOT_OURS
    assert store.read().run_id == OTHER_RUN


def test_a_broken_file_is_nobodys(store: StateStore) -> None:
    """A file that cannot be read may be somebody's evidence. Leaving does not remove it."""
    store.path.write_text("{")
    assert store.remove_if_owned(RUN) is Removal.NOT_OURS
    assert store.path.read_text() == "{"


def test_a_worker_of_an_old_run_does_not_write_into_its_successors_file(store: StateStore) -> None:
    worker = StateStore(store.path, run_id=RUN)
    worker.update(lambda current: current.components[NAME].__setattr__("lease", "ab"))
    store.rewrite(state(OTHER_RUN))
    with pytest.raises(StateError, match=f"belongs to run {OTHER_RUN}, not to ours"), worker.transaction():
        pass


def test_a_worker_never_repairs_a_broken_file(store: StateStore) -> None:
    store.path.write_text('{"schema_version": 1, "names')
    with pytest.raises(StateError, match=f"{store.path} is not valid JSON"), store.transaction():
        pass
    assert store.path.read_text() == '{"schema_version": 1, "names'
    assert visible(store) == ["dynamo.json"]


def test_a_file_that_cannot_be_read_now_is_not_set_aside(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors the lock may be had, and the file not: it was taken for a broken one, twice at once."""
    before = store.path.read_bytes()

    really = os.open

    def no_descriptor(path: str, flags: int, *more: int) -> int:
        if os.fspath(path) == str(store.path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(path, flags, *more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", no_descriptor)
        with pytest.raises(StateError, match="cannot be read"):
            store.rewrite(state())

    assert store.path.read_bytes() == before
    assert list(store.path.parent.glob("*.corrupt-*")) == []


def test_the_arbiter_sets_a_broken_file_aside_and_writes_its_own_view(store: StateStore) -> None:
    kept = []
    for text in ("{", "[]"):
        store.path.write_text(text)
        aside = store.rewrite(state())
        assert aside is not None
        assert aside.name.startswith("dynamo.json.corrupt-2")
        kept.append(aside)
    assert [path.read_text() for path in kept] == ["{", "[]"]
    assert store.read() == state()
    assert store.rewrite(state(OTHER_RUN)) is None


def test_a_broken_file_can_be_set_aside_alone(store: StateStore) -> None:
    """`serve` at start, with no view of its own yet; a sound file and an absent one are left as they are."""
    assert store.set_aside_if_broken() is None
    store.path.write_text("")
    aside = store.set_aside_if_broken()
    assert aside is not None
    assert visible(store) == [aside.name]
    assert store.set_aside_if_broken() is None


def test_an_invalid_view_does_not_move_the_old_file(store: StateStore) -> None:
    store.path.write_text("{")
    wrong = state()
    wrong.run_id = "no good"
    with pytest.raises(StateError, match="run_id"):
        store.rewrite(wrong)
    assert visible(store) == ["dynamo.json"]


def test_create_refuses_a_file_that_is_there(store: StateStore) -> None:
    with pytest.raises(StateError, match="exists already"):
        store.create(state())
    store.path.write_text("{")
    with pytest.raises(StateError, match="exists already"):
        store.create(state())


def test_a_missing_file_is_not_made_by_a_transaction(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "dynamo.json")
    with pytest.raises(StateMissing), store.transaction():
        pass
    assert visible(store) == []


def test_a_token_in_the_environment_reaches_no_file(tmp_path: Path) -> None:
    """A writer whose environment is full of secrets leaves none in the folder."""
    code = (
        "import sys; from pathlib import Path; from dynamo_local.state import *\n"
        "store = StateStore(Path(sys.argv[1]))\n"
        "store.create(State(namespace='dynamo', run_id=new_run_id()))\n"
        "with store.transaction() as s: s.nats_token_file = '/run/nats.token'\n"
    )
    env = {**os.environ, "HF_TOKEN": "hush-hush", "NATS_PASSWORD": "hush-hush"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "dynamo.json")], env=env, timeout=30, check=True)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert json.loads((tmp_path / "dynamo.json").read_text())["nats_token_file"] == "/run/nats.token"
    assert not [text for text in texts if "hush-hush" in text]


def test_reading_the_file_for_status_imports_nothing_heavy() -> None:
    """`dynamo status` is quick because `read_raw` brings neither pydantic nor filelock."""
    code = (
        "import sys; from dynamo_local.state.raw import read_raw, statefile_path\n"
        "sys.exit(','.join({'pydantic', 'filelock', 'asyncio'} & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_bare_package_name_is_refused() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", "import state"], cwd=root, capture_output=True, text=True, timeout=30, check=False
    )
    assert "import dynamo_local.state, not the bare 'state'" in done.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import dynamo_local.state as package

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
    assert all(hasattr(package, name) for name in package.__all__)
