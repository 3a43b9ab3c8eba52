"""The oracle's findings, as docs/api.md shows them: `docs/vllm_oracle.json`, a table by docs/generate.py."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tests.vllm.oracle.asking import Outcome

FILE = Path(__file__).parents[3] / "docs" / "vllm_oracle.json"
WRITE = "DYN_ORACLE_WRITE"
"""Set it, and docs/vllm_oracle.json says what was found (then run docs/generate.py)."""


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For each path: requests, parameters, and the differences between the answers."""
    paths: dict[str, Any] = {}
    for outcome in outcomes:
        case = outcome.case
        row = paths.setdefault(case.path, {"requests": 0, "streamed": 0, "parameters": [], "differs": {}})
        row["requests"] += 1
        row["streamed"] += case.stream
        if case.parameter not in row["parameters"]:
            row["parameters"].append(case.parameter)
        if found := outcome.differs:
            row["differs"][case.parameter] = case.differs or found
    return paths


def write_if_asked(part: Literal["graphs", "models"], name: str, outcomes: Sequence[Outcome]) -> None:
    """For one graph or one kind of model; the other results stay."""
    if not os.environ.get(WRITE):
        return
    import vllm

    told = json.loads(FILE.read_text()) if FILE.exists() else {}
    parts = {"graphs": {}, "models": {}}
    if told.get("vllm") == vllm.__version__:
        parts |= {key: told.get(key, {}) for key in parts}
    parts[part] = dict(sorted({**parts[part], name: summary(outcomes)}.items()))
    FILE.write_text(json.dumps({"vllm": vllm.__version__, **parts}, indent=1) + "\n")
