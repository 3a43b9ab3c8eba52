"""What the oracle has found, as docs/api.md shows it: `docs/vllm_oracle.json`, a table by docs/generate.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.oracle.asking import Outcome

FILE = Path(__file__).parents[3] / "docs" / "vllm_oracle.json"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """By path: how many requests, which parameters, and how the answers differ, if they do."""
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


def write(graph: str, version: str, outcomes: Sequence[Outcome]) -> None:
    """Of one graph; what was found with the others stays."""
    told = json.loads(FILE.read_text()) if FILE.exists() else {}
    graphs = told.get("graphs", {}) if told.get("vllm") == version else {}
    graphs[graph] = summary(outcomes)
    FILE.write_text(json.dumps({"vllm": version, "graphs": dict(sorted(graphs.items()))}, indent=1) + "\n")
