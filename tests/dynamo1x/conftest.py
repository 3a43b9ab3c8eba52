"""The rule that in `tox -e dynamo1x` a skip is a failure (DYN_DYNAMO1X_REQUIRED)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.tools.required import fail_where_skipped

REQUIRED = "DYN_DYNAMO1X_REQUIRED"


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if find_spec("dynamo") is None or find_spec("dynamo.mocker") is None:
        pytest.skip("ai-dynamo is not installed here; tox -e dynamo1x installs it")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    fail_where_skipped(session, exitstatus, REQUIRED)
