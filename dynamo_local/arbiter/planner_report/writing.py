"""Writes a report, whole or not at all, and keeps the last ones."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from dynamo_local.arbiter.planner_report.charts import known_charts, picture
from dynamo_local.arbiter.planner_report.data import gathered
from dynamo_local.arbiter.planner_report.page import page
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.planner.records.decision_log import oldest_first
from dynamo_local.planner.records.figures import Line
from dynamo_local.system.pages import write_page

KEPT = 30
"""So many reports stay in the folder; older ones are removed."""
PICTURED = 7
"""So many of the charts are in a picture."""
_OURS = re.compile(r"planner_report_\d{8}T\d{6}Z(_\d+)?\.html")


def write_report(log: Path, to: Path, *, since_s: float | None = None, title: str) -> int:
    """The report of the decisions in that log after `since_s` (Unix time), as a page, or as a picture (`.svg`).

    How many decisions it is made of. Raises `NotRunning` where there are none, `BadInput` where it cannot be written.
    """
    found = gathered(_after(log, since_s))
    if not found.points:
        when = "" if since_s is None else f" after {datetime.fromtimestamp(since_s).astimezone():%Y-%m-%d %H:%M:%S}"
        raise NotRunning(f"there is no decision{when} in {log}: nothing to report; `dynamo planner status` says why")
    if to.suffix == ".svg":
        write_page(to, picture(known_charts(found.points)[:PICTURED], found.points))
    else:
        write_page(to, page(found, title))
    return found.decisions


def write_next(log: Path, folder: Path, *, since_s: float, title: str) -> Path | None:
    """A report with the time in its name, beside the last ones; None where nothing was decided since. Raises
    `BadInput`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"the folder {folder} of reports cannot be made: {error.strerror}") from error
    path = _free(folder)
    try:
        write_report(log, path, since_s=since_s, title=title)
    except NotRunning:
        return None
    names = [each for each in folder.iterdir() if _OURS.fullmatch(each.name)]
    halves = folder.glob(".planner_report_*.html.*")  # of processes that were killed
    for old in (*sorted(names)[:-KEPT], *halves):
        old.unlink(missing_ok=True)
    return path


def title_of(namespace: str) -> str:
    """`Planner of dynamo on gpu-host`"""
    return f"Planner of {namespace} on {socket.gethostname()}"


def _free(folder: Path) -> Path:
    name = f"planner_report_{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    path, n = folder / f"{name}.html", 1
    while path.exists():
        path, n = folder / f"{name}_{n}.html", n + 1
    return path


def _after(log: Path, since_s: float | None) -> Iterator[Line]:
    return (line for line in oldest_first(log) if since_s is None or line["wall_s"] >= since_s)
