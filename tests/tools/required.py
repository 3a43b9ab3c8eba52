"""For tiers that must not look successful because nothing ran: there a skip, or an empty collection, fails."""

from __future__ import annotations

import os

import pytest

NEEDS_ROOT = "needs root"
"""The reason of a skip that is none of the tier's business."""


def fail_where_skipped(session: pytest.Session, exitstatus: int, variable: str) -> None:
    """From `pytest_sessionfinish`, `trylast`: where the variable is set, a skip would look like a success."""
    if not os.environ.get(variable) or exitstatus != pytest.ExitCode.OK:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", ()) if reporter is not None else ()
    skipped = [report for report in reports if NEEDS_ROOT not in str(report.longrepr)]
    if skipped or not session.testscollected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
