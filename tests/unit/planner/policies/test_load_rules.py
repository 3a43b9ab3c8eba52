"""The load planner's rules: the worked cases of planner-rules, and the boundaries between them."""

from __future__ import annotations

import pytest

from tests.fakes.planner.load_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case) -> None:
    case.check(case.decide())
