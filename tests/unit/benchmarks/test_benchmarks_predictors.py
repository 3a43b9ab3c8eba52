"""The comparison of predictors: what is compared, and the page that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measured_pages import END, write_measured
from benchmarks.predictors.cases import Case
from benchmarks.predictors.measure import Cost, Error, Facts, compare, continued
from benchmarks.predictors.page import section
from dynamo_local.config.planner import PlannerConfig

RISING = Case("a ramp", 60.0, "made by hand", {"num_req": tuple(100.0 + 10 * number for number in range(40))})
OURS = {
    "constant": PlannerConfig(policy="sla", load_predictor="constant"),
    "kalman": PlannerConfig(policy="sla", load_predictor="kalman"),
}


def facts(**given: object) -> Facts:
    empty = Facts(origins=5, sources={"a ramp": "made by hand"}, errors=[], costs=[], absent=[], curves={"a ramp": {}})
    return Facts(**{**{name: getattr(empty, name) for name in Facts.__slots__}, **given})  # type: ignore[arg-type]


def test_an_error_is_measured_against_what_came_and_against_constant_s() -> None:
    """On a ramp of 10 a window `constant` is 10 off after one window and 30 after three, and a trend is right."""
    found = facts()
    compare(found, RISING, "num_req", RISING.columns["num_req"], OURS, lambda tasks: map(continued, tasks))
    errors = {(error.predictor, error.ahead): error for error in found.errors}
    assert [errors["constant", ahead].mae for ahead in (1, 3)] == pytest.approx([10, 30])
    assert [errors["constant", ahead].scaled for ahead in (1, 3)] == [1.0, 1.0]
    assert errors["kalman", 3].scaled < 0.01
    assert found.curves["a ramp"]["at"][0] == 10.0


def test_the_page_shows_errors_costs_and_what_was_not_there(tmp_path: Path) -> None:
    told = facts(
        errors=[
            Error("constant", "a ramp", "num_req", 1, 10.0, 1.0, 0),
            Error("kalman", "a ramp", "num_req", 1, 2.5, 0.25, 0),
        ],
        costs=[Cost("constant", 0.2, {"50": 0.001}, 21.0), Cost("kalman", 0.2, {"50": 0.002}, 21.0)],
        absent=["load-predictor arima needs statsforecast"],
    )
    told.save(tmp_path / "facts.json")
    assert Facts.load(tmp_path / "facts.json") == told
    text = section(told)
    assert "| a ramp | 1 | 10.0 (1.00) | 2.5 (0.25) |" in text
    assert "* load-predictor arima needs statsforecast" in text
    assert "| `kalman` | 0.25 |" in text


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: this -->\nold\n" + END + "\nafter\n")
    write_measured(page, "this", "new")
    assert page.read_text() == f"before\n<!-- measured: this -->\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="lacks"):
        write_measured(page, "that", "newer")
    assert "new\n" in page.read_text()
