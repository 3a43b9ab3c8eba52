"""The folder of statefiles: whose it is, and what of it is believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dynamo_local.errors import StateError
from dynamo_local.state.schema import State
from dynamo_local.state.store import StateStore


def state() -> State:
    return State(namespace="dynamo", run_id="01JD3YQZ8E6W4T1V0K2M5N7P9R")


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """A store with a file in it."""
    store = StateStore(tmp_path / "state" / "dynamo.json")
    store.create(state())
    return store


def test_folder_and_file_are_private(tmp_path: Path) -> None:
    folder = tmp_path / ".dynamo" / "state"
    old = os.umask(0)
    try:
        store = StateStore(folder / "dynamo.json")
        store.create(state())
    finally:
        os.umask(old)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o2770])
def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    """Others may have a use for it: a shared 1777 folder was closed to all of them. Our files stay private."""
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    StateStore(folder / "dynamo.json").create(state())
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_another_users_statefile_is_not_believed(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = store.path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StateError, match=rf"belongs to uid {owner}, not to you .*run this as that user"):
        store.read()


def test_a_pipe_in_place_of_the_statefile_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dynamo.json")
    with pytest.raises(StateError, match="not a plain file"):
        StateStore(tmp_path / "dynamo.json").read()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StateError, match="not to you; set DYN_LOCAL_STATE_DIR"):
        StateStore(tmp_path / "dynamo.json").create(state())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be used for statefiles"):
        StateStore(tmp_path / "file" / "dynamo.json").create(state())
