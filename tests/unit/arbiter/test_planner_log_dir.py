"""A log-dir that cannot be honoured is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.arbiter import tensorboard
from dynamo_local.arbiter.request import ServeOptions, understand
from tests.tools.clean_imports import clean_imports

EXAMPLE = Path(__file__).parents[3] / "examples" / "llm"


def _understand(tmp_path: Path, *overrides: str, planner: bool | None) -> None:
    options = ServeOptions(
        "graphs.agg:Frontend", file=EXAMPLE / "configs/agg.yaml", overrides=overrides, planner=planner
    )
    with clean_imports():
        understand(options, {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}, EXAMPLE)


def test_without_the_extra_a_log_dir_does_not_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    _understand(tmp_path, "--Planner.log-dir=tb", planner=True)


def test_without_the_extra_a_planner_without_a_log_dir_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    _understand(tmp_path, planner=True)
    _understand(tmp_path, "--Planner.log-dir=tb", planner=False)  # it does not start
