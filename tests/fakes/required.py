"""For tiers that must not look successful because nothing ran: there a skip, or an empty collection, fails."""

from __future__ import annotations

import os

import pytest


def fail_where_skipped(session: pytest.Session, exitstatus: int, variable: str) -> None:
    """From `pytest_sessionfinish`, `trylast`: where the variable is set, a skip would look like a success."""
    if not os.environ.get(variable) or exitstatus != pytest.ExitCode.OK:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", ())) if reporter is not None else 0
    if skipped or not session.testscollected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
