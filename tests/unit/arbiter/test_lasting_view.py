"""A view whose terminal goes away while the run goes on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

from dynamo_local.arbiter.progress import BootReport, LastingView, PlainView, Row

SCRIPT = """
import sys
from pathlib import Path
from dynamo_local.arbiter.progress import open_view
view = open_view()
view.event("first"); sys.stdin.read()
for n in range(3):
    view.event("nobody reads this"); view.log_line("dynamo_W", "nor this", ["dynamo_W"])
Path(sys.argv[1]).write_text(f"wants logs: {view.wants_logs}")
view.failed("and not this", 1); view.close(); print("at the end"); sys.exit(7)
"""


class Full(io.StringIO):
    """Takes nothing."""

    def write(self, text: str) -> int:
        """As a full disk."""
        raise OSError(28, os.strerror(28))


def test_a_view_that_fails_is_not_tried_again() -> None:
    silenced: list[str] = []
    view = LastingView(PlainView(Full()), lambda: silenced.append("once"))
    assert view.wants_logs
    view.event("lost")
    view.rows("title", [Row("dynamo_W", "ready", "0", 1.0)])
    view.ready({"namespace": "dynamo"})
    view.close()
    assert not view.wants_logs
    assert silenced == ["once"]


def test_a_process_whose_output_nobody_reads_goes_on_and_ends_as_it_means_to(tmp_path: Path) -> None:
    told = tmp_path / "told"
    words = [sys.executable, "-c", SCRIPT, str(told)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(30) == 7
    assert told.read_text() == "wants logs: False"


def test_a_boot_report_is_read_to_its_end_and_then_nobody_reads_the_output(tmp_path: Path) -> None:
    """A detached run prints into its parent's memory while that waits; what came later would grow for ever."""
    silenced: list[str] = []
    report = BootReport(tmp_path / "report", lambda: silenced.append("once"))
    report.event("a start")
    assert silenced == []
    report.ready({"namespace": "dynamo"})
    report.event("of the run")
    report.close()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "report").read_text().splitlines()]
    assert (kinds, silenced) == (["event", "ready"], ["once"])
