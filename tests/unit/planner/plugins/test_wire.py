"""The wire format: the compiled descriptors are those of `plugin.proto`, and values survive the way there and back."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Missing
from dynamo_local.planner.plugins import codec
from dynamo_local.planner.stages import (
    Answer,
    Fpm,
    Nothing,
    Observations,
    PipelineContext,
    Predicted,
    Stage,
    Unusable,
    Workers,
)
from dynamo_local.planner.values import (
    Accept,
    ComponentTarget,
    Override,
    OverrideType,
    Prediction,
    Proposal,
    Reject,
    Traffic,
)
from tests.tools.compile_proto import COMPILED, compiled
from tests.tools.examples import examples

ENGINE = EngineId("7587", 1)
CONTEXT = PipelineContext(
    request_id="r-1",
    at_s=0.0,
    decision_id="r-1-d",
    observations=Observations(
        Traffic(
            0.0, 180.0, num_req=7200.0, isl=3000.0, osl=300.0, kv_hit_rate=0.0, accept_length=Missing("it was not sent")
        ),
        Fpm({ENGINE: ForwardPass(ENGINE, 3, 0.02, Requests(2, 4000), Requests(1, 900))}, {}),
        Workers(ready_decode=0, expected_decode=1, decode_scaling_in_progress=False),
    ),
    predictions=Prediction(num_req=0.0, isl=3000.5, source="arima"),
    proposal=(ComponentTarget("decode", 0),),
)
PROPOSALS = (
    Proposal("a", 0, Accept()),
    Proposal("b", 5, Override((ComponentTarget("decode", 3, OverrideType.AT_MOST),), "why")),
    Proposal("c", 2**32 - 1, Reject("no")),
)


def test_the_compiled_descriptors_are_those_of_the_proto() -> None:
    ours, made = (descriptor_pb2.FileDescriptorSet.FromString(raw) for raw in (COMPILED.read_bytes(), compiled()))
    assert ours == made


@pytest.mark.parametrize("stage", list(Stage))
def test_a_plugin_is_shown_what_the_planner_knows(stage: Stage) -> None:
    """None is not 0 on the way: a role that is not there stays None, a rate of 0 stays 0."""
    raw = codec.request(stage, CONTEXT, PROPOSALS)
    said = codec.parsed(codec.METHODS[stage][1], raw)
    seen = codec.context_of_message(said.context)
    assert seen.observations.traffic is not None
    assert seen.observations.traffic.kv_hit_rate == 0.0
    assert isinstance(seen.observations.traffic.accept_length, Missing)
    assert seen == CONTEXT
    if stage is Stage.RECONCILE:
        assert codec.proposals_of_message(said.proposals) == PROPOSALS


@pytest.mark.parametrize(
    ("stage", "answer"),
    [
        (Stage.PREDICT, Predicted()),
        (Stage.PREDICT, Predicted(None, final=True)),
        (Stage.PREDICT, Predicted(Prediction(num_req=0.0, accept_length=1.5, source="x"), final=True)),
        *[(stage, answer) for stage in list(Stage)[1:] for answer in (Accept(), Reject("no"), Nothing())],
        *[(stage, Override(CONTEXT.proposal or (), "why", final=True)) for stage in list(Stage)[1:]],
    ],
)
def test_answers_come_back_as_they_were_given(stage: Stage, answer: Answer) -> None:
    assert codec.answer(stage, codec.response(stage, answer)) == answer


@settings(max_examples=examples(300))
@given(st.sampled_from(list(Stage)), st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_unusable(stage: Stage, raw: bytes) -> None:
    with contextlib.suppress(Unusable):
        assert isinstance(codec.answer(stage, raw), Answer)
