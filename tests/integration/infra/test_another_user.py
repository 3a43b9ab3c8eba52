"""Attacks of another user of the host on a running graph: the graph's real processes, and a real user."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tests.drivers.served import AGG, Served
from tests.drivers.servers import RealEtcd
from tests.drivers.stranger import Stranger, another_user

pytestmark = pytest.mark.infra


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    with another_user() as user:
        yield user


@pytest.fixture(scope="module")
def graph(stranger: Stranger) -> Iterator[Served]:
    """A graph of ours. Others may look into the folders that hold ours, as into many a home: our own must be shut."""
    with Served(target=AGG) as served:
        for folder in (served.folder, served.folder / "home", served.folder / "run"):
            folder.chmod(0o755)
        yield served.start()


def endpoint(graph: Served, *, peer: bool = False) -> str:
    ports = next(entry["ports"] for entry in graph.statefile()["servers"].values() if entry["kind"] == "etcd")
    return f"https://127.0.0.1:{ports[peer]}"


def pids(graph: Served) -> list[int]:
    return [pid for pid, _ in graph.processes()]


def test_his_etcdctl_works_where_nothing_is_guarded(stranger: Stranger, own_etcd: RealEtcd) -> None:
    """Without this, the refusals below would say nothing."""
    assert stranger.etcdctl(own_etcd.endpoint, "put", "a", "b").stdout == "OK\n"


@pytest.mark.parametrize(
    "words",
    [
        "get --prefix dynamo/",
        'put v1/instances/dynamo/backend/generate/1 {"transport":{"tcp":"127.0.0.1:1/x"}}',
        "lease revoke LEASE",
        *(
            pytest.param(words, marks=pytest.mark.full)
            for words in (
                "put dynamo/models/evil {}",
                'put dynamo/disagg_router/sim-tiny {"max_local_prefill_length":1}',
                "del --prefix dynamo/",
                "lease grant 60",
                "auth enable",
                "member list",
                "endpoint health",
            )
        ),
    ],
)
def test_etcd_refuses_him(graph: Served, stranger: Stranger, words: str) -> None:
    keys, lease = graph.keys(""), graph.worker("VllmWorker")["lease"]
    done = stranger.etcdctl(endpoint(graph), *(lease if word == "LEASE" else word for word in words.split(" ")))
    assert done.returncode != 0
    assert done.stdout == "" or "unhealthy" in done.stdout + done.stderr
    assert graph.keys("") == keys
    assert set(graph.states().values()) == {"ready"}


def test_etcds_peer_port_refuses_him(graph: Served, stranger: Stranger) -> None:
    assert stranger.etcdctl(endpoint(graph, peer=True), "member", "list").returncode != 0


def test_its_user_can_do_all_of_it(graph: Served) -> None:
    assert graph.etcdctl("put", "dynamo/test/a", "b") == "OK\n"
    assert graph.etcdctl("del", "dynamo/test/a").strip() == "1"


def test_nats_refuses_him(graph: Served, stranger: Stranger) -> None:
    port = int(graph.status()["nats_server"].rpartition(":")[2])
    assert stranger.gets(nats=[port])["nats"] == []


def test_he_reads_and_writes_none_of_its_files(graph: Served, stranger: Stranger) -> None:
    runtime = graph.paths.runtime
    secrets = [*runtime.rglob("*"), graph.paths.statefile, *graph.paths.logs.rglob("*")]
    assert {"key.pem", "token", "nats.conf", "ctl.sock", "dynamo.json"} <= {path.name for path in secrets}
    found = stranger.gets(files=[str(graph.folder)], opened=[str(path) for path in secrets if path.is_file()])
    assert found == {"files": [], "opened": []}


def test_he_reaches_none_of_its_sockets(graph: Served, stranger: Stranger) -> None:
    paths = [str(path) for path in graph.paths.runtime.rglob("*.sock")]
    assert str(graph.paths.control_socket) in paths
    assert stranger.gets(sockets=paths)["sockets"] == []
    # etcd has one datagram socket more, by which it would write to systemd's journal; it never reads from it.
    without_file = {
        f"\0{connection.laddr[1:]}"
        for pid in pids(graph)
        for connection in psutil.Process(pid).net_connections("unix")
        if connection.type == socket.SOCK_STREAM and str(connection.laddr).startswith(("@", "\0"))
    }
    assert len(without_file) >= 2, "where a Frontend and a worker take answers"
    assert stranger.gets(sockets=sorted(without_file))["sockets"] == []


def test_he_reads_no_shared_memory_of_ours(stranger: Stranger) -> None:
    """vLLM's processes exchange their messages by Python's own shared memory."""
    block = SharedMemory(create=True, size=16)
    try:
        path = f"/dev/shm/{block.name}"
        assert Path(path).exists()
        assert stranger.gets(opened=[path])["opened"] == []
    finally:
        block.close()
        block.unlink()


def test_he_can_do_nothing_to_its_processes(graph: Served, stranger: Stranger) -> None:
    assert stranger.gets(processes=pids(graph))["processes"] == []


def test_what_anybody_can_read_of_its_processes_holds_no_secret(graph: Served) -> None:
    folder = graph.paths.runtime
    key = (folder / "certificates" / "key.pem").read_text().splitlines()[1]
    token = (folder / "nats" / "token").read_text().strip()
    lines = "\n".join(" ".join(psutil.Process(pid).cmdline()) for pid in pids(graph))
    logs = "\n".join(path.read_text(errors="replace") for path in graph.paths.logs.rglob("*.log"))
    for where in (lines, logs, graph.paths.statefile.read_text()):
        assert key not in where
        assert token not in where
