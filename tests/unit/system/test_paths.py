"""Where a namespace's files live, and who may use the folders."""

from __future__ import annotations

import json
import os
import pwd
import stat
from pathlib import Path

import pytest

from dynamo_local.errors import ConfigError, StateError
from dynamo_local.system.paths import Paths, goes_at_logout, private_folder, runtime_root


def test_the_runtime_folder_follows_xdg_and_else_is_one_per_user(tmp_path: Path) -> None:
    assert runtime_root({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/dynamo")
    assert runtime_root({"TMPDIR": str(tmp_path)}) == tmp_path / f"dynamo-{os.getuid()}"


def test_the_statefile_is_where_the_predecessor_had_it() -> None:
    """`$DYN_LOCAL_STATE_DIR/<namespace>.json`, by default `~/.dynamo/state`."""
    assert Paths.of("ns", {"HOME": "/home/x"}).statefile == Path("/home/x/.dynamo/state/ns.json")
    assert Paths.of("ns", {"DYN_LOCAL_STATE_DIR": "/s", "HOME": "/h"}).statefile == Path("/s/ns.json")


def test_folders_are_made_private(tmp_path: Path) -> None:
    paths = Paths.of("ns", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    paths.prepare()
    for folder in (paths.runtime, paths.runtime.parent, paths.logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_closed(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    assert stat.S_IMODE(private_folder(loose).stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a plain folder"):
        private_folder(tmp_path / "link")


def test_a_strangers_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to uid .* set XDG_RUNTIME_DIR"):
        private_folder(folder)


def test_a_control_socket_that_the_kernel_would_cut_is_refused(tmp_path: Path) -> None:
    """A unix socket's path has at most 107 bytes."""
    deep = tmp_path / ("f" * 60)
    paths = Paths.of("n" * 60, {"XDG_RUNTIME_DIR": str(deep), "HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match="107"):
        paths.prepare()


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "a.b", "ü", "-x", "_x", "n" * 65, "n\n"])
def test_a_namespace_that_cannot_name_a_file_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"not usable: (begin with a letter or a digit|it has 65 characters)"):
        Paths.of(bad, {})


@pytest.mark.parametrize("name", ["gpus", "GPUS", "v1"])
def test_a_reserved_namespace_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"namespace '{name}' is reserved: it is the .*; choose another name"):
        Paths.of(name, {})


def test_a_run_is_found_where_its_statefile_says(tmp_path: Path) -> None:
    """Not where the variables of this shell would put it."""
    began = Paths.of("ns", {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/one", "DYN_LOCAL_LOG_DIR": "/logs/one"})
    began.statefile.parent.mkdir(parents=True)
    began.statefile.write_text(json.dumps({"runtime_dir": str(began.runtime), "log_dir": str(began.logs)}))
    for env in ({}, {"XDG_RUNTIME_DIR": "/run/two"}, {"TMPDIR": "/tmp/two", "DYN_LOCAL_LOG_DIR": "/logs/two"}):
        assert Paths.found("ns", {**env, "HOME": str(tmp_path)}) == began


def test_the_logs_of_an_earlier_releases_run_are_where_its_workers_write(tmp_path: Path) -> None:
    golden = Path(__file__).parents[2] / "golden" / "statefile" / "v1-disagg.json"
    (tmp_path / "dynamo.json").write_text(golden.read_text())
    found = Paths.found("dynamo", {"DYN_LOCAL_STATE_DIR": str(tmp_path), "HOME": "/elsewhere"})
    assert found.logs == Path("/home/u/.dynamo/logs/dynamo")
    assert found.runtime == Path("/run/user/0/dynamo/dynamo")


@pytest.mark.parametrize("runtime", ["/home/me", "/dynamo/other", "dynamo/ns", "/srv/notdynamo/ns", 7, None])
def test_a_folder_that_cannot_be_ours_is_not_believed(tmp_path: Path, runtime: object) -> None:
    """It is removed with all that is in it when the run ends; a statefile may have been edited."""
    env = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/one"}
    paths = Paths.of("ns", env)
    paths.statefile.parent.mkdir(parents=True)
    paths.statefile.write_text(json.dumps({"runtime_dir": runtime}))
    assert Paths.found("ns", env).runtime == paths.runtime


def test_two_names_of_one_folder_mean_one_run(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    found = [Paths.of("ns", {"HOME": str(tmp_path / name)}).statefile for name in ("home", "link")]
    assert found[0] == found[1]


def test_the_folder_that_logind_removes_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "run" / "user" / str(os.getuid())
    assert not goes_at_logout(mine, tmp_path), "there is no logind"
    (tmp_path / "run" / "systemd" / "users").mkdir(parents=True)
    assert goes_at_logout(mine, tmp_path)
    assert not goes_at_logout(tmp_path / "chosen", tmp_path)
    linger = tmp_path / "var" / "lib" / "systemd" / "linger"
    linger.mkdir(parents=True)
    (linger / pwd.getpwuid(os.getuid()).pw_name).touch()
    assert not goes_at_logout(mine, tmp_path)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(StateError, match="has no home; set HOME, or DYN_LOCAL_STATE_DIR and DYN_LOCAL_LOG_DIR"):
        Paths.of("ns", {})
    assert Paths.of("ns", {"DYN_LOCAL_STATE_DIR": "/s", "DYN_LOCAL_LOG_DIR": "/l"}).logs == Path("/l/ns")
