"""Where a namespace's files live, and who may use the folders."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dynamo_local.errors import ConfigError
from dynamo_local.serve.paths import Paths, private_folder, runtime_root


def test_the_runtime_folder_follows_xdg_and_else_is_one_per_user(tmp_path: Path) -> None:
    """Without XDG_RUNTIME_DIR the temporary folder is shared: the uid keeps users apart."""
    assert runtime_root({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/dynamo")
    assert runtime_root({"TMPDIR": str(tmp_path)}) == tmp_path / f"dynamo-{os.getuid()}"


def test_the_statefile_is_where_the_predecessor_had_it() -> None:
    """`$DYN_LOCAL_STATE_DIR/<namespace>.json`, by default `~/.dynamo/state`."""
    assert Paths.of("ns", {"HOME": "/home/x"}).statefile == Path("/home/x/.dynamo/state/ns.json")
    assert Paths.of("ns", {"DYN_LOCAL_STATE_DIR": "/s", "HOME": "/h"}).statefile == Path("/s/ns.json")


def test_folders_are_made_private(tmp_path: Path) -> None:
    """Whoever can write the control socket can run commands as its owner."""
    paths = Paths.of("ns", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    paths.prepare()
    for folder in (paths.runtime, paths.runtime.parent, paths.logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_closed(tmp_path: Path) -> None:
    """A folder of ours with loose permissions is tightened, not refused."""
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    assert stat.S_IMODE(private_folder(loose).stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Somebody else's link in /tmp must not choose where our sockets go."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a plain folder"):
        private_folder(tmp_path / "link")


def test_a_strangers_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is checked, and the error says what to set."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to uid .* set XDG_RUNTIME_DIR"):
        private_folder(folder)


def test_a_control_socket_that_the_kernel_would_cut_is_refused(tmp_path: Path) -> None:
    """A unix socket's path has at most 107 bytes (circus-facts)."""
    paths = Paths.of("n" * 90, {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match="107"):
        paths.prepare()


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "a.b", "ü"])
def test_a_namespace_that_cannot_name_a_file_is_refused(bad: str) -> None:
    """It becomes a file name, a watcher name and a NATS subject."""
    with pytest.raises(ConfigError, match="only letters"):
        Paths.of(bad, {})
