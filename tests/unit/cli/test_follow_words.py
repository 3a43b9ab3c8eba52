"""Tests what is said of the virtual connector in `dynamo status` and `dynamo planner status`: from JSON alone."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.cli.planner_words import follow_line, status_lines
from dynamo_local.cli.status import render
from tests.fakes.arbiter.supervisor import FakeSupervisor

FOLLOW: dict[str, Any] = {
    "environment": "virtual",
    "layout": "v1",
    "keys": "v1/dynamo/planner/",
    "phase": "waiting",
    "decision_id": -1,
    "num_prefill_workers": -1,
    "num_decode_workers": -1,
    "scaled_decision_id": -1,
    "reason": "no decision yet",
}
DECIDED = {**FOLLOW, "decision_id": 7, "num_prefill_workers": 1, "num_decode_workers": 3}
HEAD = "virtual (v1/dynamo/planner/): "
PLANNER: dict[str, Any] = {"state": "running", "no_operation": False, "options": {"adjustment_interval": 30.0}}
VIRTUAL = {
    "keys": "v1/dynamo/planner/",
    "num_prefill_workers": 1,
    "num_decode_workers": 3,
    "decision_id": 7,
    "scaled_decision_id": 6,
    "pending": True,
    "waits_s": 12.3,
}


@pytest.mark.parametrize(
    ("follow", "line"),
    [
        (FOLLOW, "waits: no decision yet"),
        ({**DECIDED, "phase": "under_way", "reason": "D: 1 of 3 ready"}, "is under way: D: 1 of 3 ready"),
        ({**DECIDED, "phase": "done", "reason": None}, "is carried out"),
        (
            {**DECIDED, "phase": "refused", "reason": "D=3: no GPU"},
            "cannot be carried out, and is not acknowledged: D=3: no GPU",
        ),
        ({**DECIDED, "phase": "unreadable", "reason": "x"}, "cannot be read, nothing is changed: x"),
        ({**DECIDED, "phase": "of_a_newer_version", "reason": None}, "of_a_newer_version"),
    ],
)
def test_where_it_stands_is_one_line(follow: dict[str, Any], line: str) -> None:
    decision = "" if follow["decision_id"] < 0 else "decision 7 (prefill=1, decode=3) "
    assert follow_line(follow) == f"{HEAD}{decision}{line}"


def test_it_stands_in_the_status_only_where_somebody_is_followed() -> None:
    graph = FakeSupervisor(["dynamo_VllmWorker"]).status()
    assert "follow " not in render(graph)
    assert f"follow    {HEAD}waits: no decision yet" in render({**graph, "follow": FOLLOW})
    assert f"follow    {HEAD}waits: no decision yet" in "\n".join(
        status_lines({**PLANNER, "state": "stopped", "follow": FOLLOW})
    )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"decision_id": -1}, "no decision yet"),
        ({}, "decision 7 (prefill=1, decode=3), not acknowledged for 12 s"),
        ({"pending": False}, "decision 7 (prefill=1, decode=3), not acknowledged for 12 s: given up"),
        ({"scaled_decision_id": 7, "waits_s": None}, "decision 7 (prefill=1, decode=3), acknowledged"),
    ],
)
def test_what_our_own_planner_waits_for_is_one_line(changed: dict[str, Any], line: str) -> None:
    shown = list(status_lines({**PLANNER, "virtual": {**VIRTUAL, **changed}}))
    assert f"virtual   v1/dynamo/planner/: {line}" in shown


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        ({"name": "/srv/p", "measured": True, "certificate": "certified"}, "/srv/p (certified)"),
        ({"name": "/srv/p", "measured": True, "certificate": "uncertified"}, "/srv/p (uncertified)"),
        (
            {"name": "H200", "measured": False, "certificate": None},
            "H200 (not measured by `dynamo profile`: of other engines, and corrected by what is seen)",
        ),
    ],
)
def test_the_profile_that_is_planned_by_and_how_far_engines_are_off_it_are_lines(
    profile: dict[str, Any], line: str
) -> None:
    drift = {"component": "VllmWorker", "kind": "decode", "p50": 0.18, "p90": -0.02, "passes": 512}
    shown = list(status_lines({**PLANNER, "profile": profile, "drift": [drift]}))
    assert f"profile   {line}" in shown
    assert "drift     VllmWorker decode: +18% off the profile, p90 -2% (of 512 passes)" in shown
    assert not any(row.startswith(("profile ", "drift ")) for row in status_lines({**PLANNER, "profile": None}))


def test_only_options_that_were_set_are_shown() -> None:
    """There are fifty. The policy is always said, and what has no value any more is said to have none."""
    options = {"policy": "load", "max_gpu_budget": 6, "min_gpu_budget": 1, "no_operation": True, "log_dir": None}
    defaults = {"policy": "load", "max_gpu_budget": 8, "min_gpu_budget": 1, "no_operation": False, "log_dir": "here"}
    shown = list(status_lines({**PLANNER, "options": options}, defaults=defaults))
    assert shown[shown.index("") + 1 :] == [
        "policy          load",
        "max-gpu-budget  6",
        "no-operation    true",
        "log-dir         -",
        "(1 other options have their defaults: --json shows them)",
    ]
