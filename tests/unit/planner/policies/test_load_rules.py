"""The load planner's rules: worked cases, and the boundaries between them."""

from __future__ import annotations

import pytest

from tests.fakes.planner.load_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case) -> None:
    case.check(case.decide())
