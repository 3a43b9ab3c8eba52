"""Tests what plugins may answer, and what is made of the rest."""

from __future__ import annotations

import pytest

from dynamo_local.planner.stages import TARGETS_MAX, TEXT_MAX, Predicted, Stage, Unusable, shown, usable
from dynamo_local.planner.values import Accept, ComponentTarget, Override, OverrideType, Prediction, Reject


def test_none_is_no_opinion() -> None:
    assert usable(Stage.PREDICT, None) == Predicted()
    assert usable(Stage.CONSTRAIN, None) == Accept()


def test_a_prediction_may_come_bare() -> None:
    assert usable(Stage.PREDICT, Prediction(num_req=3)) == Predicted(Prediction(num_req=3))


@pytest.mark.parametrize(
    ("stage", "answer"),
    [
        (Stage.PREDICT, Accept()),
        (Stage.PREDICT, {"num_req": 3}),
        (Stage.PREDICT, Predicted({"num_req": 3})),  # type: ignore[arg-type]
        (Stage.PREDICT, Prediction(num_req=float("nan"))),
        (Stage.PREDICT, Prediction(isl=float("inf"))),
        (Stage.PREDICT, Prediction(osl=-1.0)),
        (Stage.PREDICT, Prediction(num_req="3")),  # type: ignore[arg-type]
        (Stage.PREDICT, Prediction(num_req=True)),
        (Stage.PROPOSE, Prediction(num_req=3)),
        (Stage.PROPOSE, [ComponentTarget("decode", 3)]),
        (Stage.PROPOSE, "accept"),
        (Stage.PROPOSE, Override(3)),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override(("decode",))),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override((ComponentTarget("decode", -1),))),
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2**31),))),
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2.5),))),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2, 9),))),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2),) * (TARGETS_MAX + 1))),
    ],
)
def test_wrong_answers_are_unusable(stage: Stage, answer: object) -> None:
    with pytest.raises(Unusable):
        usable(stage, answer)


def test_an_endless_list_of_targets_is_not_read_to_its_end() -> None:
    def endless():
        while True:
            yield ComponentTarget("decode", 1)

    with pytest.raises(Unusable, match="more than"):
        usable(Stage.PROPOSE, Override(endless()))  # type: ignore[arg-type]


def test_texts_are_cut_and_printable() -> None:
    assert usable(Stage.PROPOSE, Reject("a\nb")) == Reject("a\\nb")
    assert len(shown("x" * 10_000_000)) == TEXT_MAX + 1
    said = usable(Stage.PROPOSE, Override((ComponentTarget("decode", 1, OverrideType.AT_MOST),), reason="\x1b[2J"))
    assert said == Override((ComponentTarget("decode", 1, OverrideType.AT_MOST),), reason="\\x1b[2J")
