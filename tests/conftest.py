"""Fixtures that every kind of test may use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dynamo_local.serve.processes import is_resource_tracker
from tests.fakes.servers import RealEtcd, RealNats

_NAMESPACE_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def no_leaked_processes() -> Iterator[None]:
    """Fail the run if a child process is left when everything else has been torn down."""
    yield
    # Python's own resource tracker ends with us; vLLM in this process starts one.
    children = [child for child in psutil.Process().children(recursive=True) if not is_resource_tracker(child.pid)]
    _, alive = psutil.wait_procs(children, timeout=3.0)
    left = [f"{child.pid} {' '.join(child.cmdline())}" for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert left == [], f"processes left behind: {left}"


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test of this run uses."""
    return f"test{os.getpid()}-{next(_NAMESPACE_NUMBERS)}"


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    """One real etcd for the whole run: do not stop it; use `own_etcd` for that."""
    server = RealEtcd(tmp_path_factory.mktemp("etcd"))
    server.start_now()
    yield server
    server.stop_now()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNats]:
    """One real NATS with JetStream for the whole run: do not stop it; use `own_nats` for that."""
    server = RealNats(tmp_path_factory.mktemp("nats"))
    server.start_now()
    yield server
    server.stop_now()


@pytest.fixture
def nats_token(nats_server: RealNats) -> str:
    """The token that `nats_server` demands."""
    return nats_server.token


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[RealEtcd]:
    """An etcd of this test's own, started; free to be killed and restarted."""
    server = RealEtcd(tmp_path)
    server.start_now()
    yield server
    server.stop_now()


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[RealNats]:
    """A NATS of this test's own, started; free to be killed and restarted."""
    server = RealNats(tmp_path)
    server.start_now()
    yield server
    server.stop_now()
