"""Graphs that run for the length of a module, for tests that leave them as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.drivers.served import Served


@pytest.fixture(scope="module")
def disagg() -> Iterator[Served]:
    with Served() as served:
        yield served.start()


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[Served]:
    words = ("--VllmWorker.ServiceArgs.workers=2", "--PrefillWorker.ServiceArgs.workers", "2")
    with Served(*words) as served:
        yield served.start()
