"""`dynamo dashboard --print-url` waits for the page that a run keeps, and names its log if it does not come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dynamo_local.dashboard import commands, process
from dynamo_local.errors import NotRunning
from dynamo_local.system.paths import Paths


def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool, answers: list[Any]) -> Any:
    """The command's result, where the page answers so, one question after the other."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(commands, "ask_arbiter", lambda *_: {"graph": {"keeps_dashboard": kept}})
    monkeypatch.setattr(commands, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(process, "ask_running", lambda _: answers.pop(0) if len(answers) > 1 else answers[0])
    return CliRunner().invoke(commands.dashboard, ["--print-url", "-n", "box"])


def test_a_page_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = asked(monkeypatch, tmp_path, True, [None, None, None, {"url": "http://127.0.0.1:8700/#code=a"}])
    assert done.output == "http://127.0.0.1:8700/#code=a\n"


def test_a_page_that_does_not_come_is_named_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "START_TIMEOUT_S", 0.01)
    done = asked(monkeypatch, tmp_path, True, [None])
    assert isinstance(done.exception, NotRunning)
    assert str(Paths.of("box", os.environ).page_log) in str(done.exception)


def test_a_run_without_a_page_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = asked(monkeypatch, tmp_path, False, [None])
    assert isinstance(done.exception, NotRunning)
    assert "`dynamo dashboard` serves one" in str(done.exception)
