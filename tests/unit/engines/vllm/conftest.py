"""Tests here load the shipped graphs by their names, which are those of other tests' graphs too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.clean_imports import clean_imports


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield
