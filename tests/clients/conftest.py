"""One disaggregated graph with the sim engine, for the clients that agents are written with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.drivers.served import Served

# The extra `clients` is large, and installed for `tox -e clients` alone.
collect_ignore = [] if find_spec("litellm") else ["test_clients.py"]


@pytest.fixture(scope="session")
def graph() -> Iterator[Served]:
    """It runs for all of them."""
    with Served("--VllmWorker.max-local-prefill-length=16") as served:
        served.start()
        yield served
