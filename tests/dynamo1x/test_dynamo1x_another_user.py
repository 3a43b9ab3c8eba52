"""Another user of the host, beside Dynamo's own processes: what our servers close, and what Dynamo leaves open."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.drivers.served import Served
from tests.drivers.stranger import Stranger, another_user
from tests.dynamo1x.dynamo_graphs import INSTANCES, commands_of, graph, instances, listed

pytestmark = pytest.mark.infra


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with another_user() as user:
        yield user


async def test_he_cannot_have_requests_sent_to_himself(stranger: Stranger) -> None:
    """A worker's own request port stays open to him: Dynamo asks for no credentials there."""
    with graph("agg").started() as served:
        await listed(served)
        before = {key: served.etcdctl("get", key) for key in instances(served)}
        endpoint = served.environment()["ETCD_ENDPOINTS"]
        evil = '{"type":"Endpoint","instance_id":1,"transport":{"tcp":"127.0.0.1:9/x"}}'
        for key in (*before, f"{INSTANCES}dynamo/backend/generate/1"):
            assert stranger.etcdctl(endpoint, "put", key, evil).returncode != 0
        after = {key: served.etcdctl("get", key) for key in instances(served)}
        opened = [port for port in _request_ports(served) if _takes_anybody(port)]

    assert before
    assert after == before
    assert opened, "Dynamo's request port is closed now: docs/security.md says that it is open"


def _request_ports(served: Served) -> list[int]:
    return [
        connection.laddr.port
        for name in served.pids()
        if name != "Frontend"
        for pid in commands_of(served, name)
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def _takes_anybody(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 5.0):
        return True
