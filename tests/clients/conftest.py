"""One disaggregated graph with the sim engine, for the clients that agents are written with."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.drivers.served import Served

# The extra `clients` is large, and installed for `tox -e clients` alone.
collect_ignore = [] if find_spec("litellm") else ["test_clients.py", "test_aiperf.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """litellm makes an event loop for its own threads and leaves it open."""
    asyncio.set_event_loop(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def graph() -> Iterator[Served]:
    with Served("--VllmWorker.max-local-prefill-length=16").started() as served:
        yield served
