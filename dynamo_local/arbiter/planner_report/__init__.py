"""The planner's report: one HTML page that stands alone, made from the decision log."""

from __future__ import annotations

from pathlib import Path


def reports_folder(logs: Path) -> Path:
    """Where the reports of the namespace with that log folder are."""
    return logs / "planner_reports"
