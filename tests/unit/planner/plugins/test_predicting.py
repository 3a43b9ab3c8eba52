"""How predictions of several plugins become one."""

from __future__ import annotations

from dynamo_local.planner.stages import filled
from dynamo_local.planner.values import Prediction


def test_the_first_who_says_something_about_a_field_is_believed() -> None:
    first = filled(None, Prediction(num_req=100.0, source="theirs"), "a")
    both = filled(first, Prediction(num_req=7.0, isl=3000.0), "b")
    assert both == Prediction(num_req=100.0, isl=3000.0, source="theirs, b")


def test_zero_is_an_opinion_and_none_is_not() -> None:
    silence = filled(None, Prediction(num_req=0.0), "a")
    assert filled(silence, Prediction(num_req=50.0), "b") == Prediction(num_req=0.0, source="a")


def test_who_says_nothing_is_not_named() -> None:
    said = Prediction(num_req=1.0, source="a")
    assert filled(said, Prediction(source="b"), "b") == said
    assert filled(said, None, "b") == said
    assert filled(None, Prediction(), "b") is None
