"""Fixtures that every kind of test may use."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from dynamo_local.system.processes import is_resource_tracker
from tests.drivers.servers import RealEtcd, RealNats
from tests.tools.examples import examples

TIMING_RERUNS = 2
settings.register_profile(
    "busy machines", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machines")  # how long an example took says what else ran beside it
_NAMESPACE_NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only a test that says that it measures time (`timing`) is tried again; a rerun of any other would hide a race."""
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=TIMING_RERUNS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say of each rerun which test it was, and how many there were: also of a run without any."""
    again = Counter(report.nodeid for report in terminalreporter.stats.get("rerun", ()))
    terminalreporter.write_line(f"reruns of timing tests: {again.total()}")
    for name, count in sorted(again.items()):
        terminalreporter.write_line(f"  {count} of {name}")


@pytest.fixture(scope="session", autouse=True)
def no_leaked_processes() -> Iterator[None]:
    """Fail the run if a child process is left when everything else has been torn down."""
    yield
    # Python's own resource tracker ends with us; vLLM in this process starts one.
    children = [child for child in psutil.Process().children(recursive=True) if not is_resource_tracker(child.pid)]
    _, alive = psutil.wait_procs(children, timeout=3.0)
    left = [f"{child.pid} {' '.join(child.cmdline())}" for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert left == [], f"processes left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """A script that starts the tests in the background (`tox &`) ignores SIGINT, and all children inherit that. Ctrl-C
    could then not be tested."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test of this run uses."""
    return f"test{os.getpid()}-{next(_NAMESPACE_NUMBERS)}"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for unix sockets, whose paths have 107 bytes at most: `tmp_path` of a parallel run alone may have 90."""
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    """One real etcd for the whole run: do not stop it; use `own_etcd` for that."""
    with RealEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNats]:
    """One real NATS with JetStream for the whole run: do not stop it; use `own_nats` for that."""
    with RealNats(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[RealEtcd]:
    """An etcd of this test's own, started; free to be killed and restarted."""
    with RealEtcd(tmp_path) as server:
        yield server


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[RealNats]:
    """A NATS of this test's own, started; free to be killed and restarted."""
    with RealNats(tmp_path) as server:
        yield server
