"""`vllm serve` beside a graph for what the plain tiny model does not do: adapters, reasoning, priorities, pictures,
vectors, classes, scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.served import ROOT
from tests.vllm.hosts import VllmHost
from tests.vllm.oracle import model_cases
from tests.vllm.oracle.asking import Outcome
from tests.vllm.oracle.beside import API, Setup, compared, unexpected
from tests.vllm.oracle.report import write_if_asked
from tests.vllm.oracle.requests import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(2400)]


def host_of(host: VllmHost, folder: Path, **more: Any) -> VllmHost:
    from tests.vllm.make_tiny_model import make

    return replace(host, model=make(folder, sorted((ROOT / "docs").glob("*.md")), **more))


def answered(outcomes: Sequence[Outcome], path: str) -> int:
    return sum(outcome.theirs["status"] == 200 for outcome in outcomes if outcome.case.path == path)


@pytest.mark.parametrize("graph", ["aggregated", "disaggregated"])
async def test_adapters_reasoning_and_priorities_are_as_with_vllm_serve(
    graph: str, vllm_host: VllmHost, tmp_path: Path
) -> None:
    from tests.vllm.make_tiny_model import make_adapter

    host = host_of(vllm_host, tmp_path / "marked", marks=model_cases.MARKS)
    tokens = json.loads((host.model / "tokenizer.json").read_text())["added_tokens"]
    (end,) = [token["id"] for token in tokens if token["content"] == model_cases.MARKS[1]]
    adapter = make_adapter(tmp_path / "adapter")
    setup = Setup(
        graph,
        worker={
            "enable-lora": True,
            "max-lora-rank": 8,
            "reasoning-parser": "deepseek_r1",
            "scheduling-policy": "priority",
        },
        api={**API, "lora-modules": [f"{model_cases.ADAPTER}={adapter}"]},
    )
    kinds = {
        "adapters": model_cases.numbered(model_cases.of_adapters()),
        "reasoning": model_cases.numbered(model_cases.of_reasoning(end)),
        "priorities": model_cases.numbered(model_cases.of_priorities()),
    }
    outcomes = await compared(host, setup, tmp_path, [case for cases in kinds.values() for case in cases])
    for kind, cases in kinds.items():
        write_if_asked("models", f"{kind}, {graph}", [outcome for outcome in outcomes if outcome.case in cases])
    assert unexpected(outcomes) == []
    assert _texts(outcomes, model_cases.ADAPTER) != _texts(outcomes, MODEL), "the adapter changes nothing"
    reasoned = [outcome for outcome in outcomes if "reasoning" in json.dumps(outcome.theirs)]
    both = [text for text in map(json.dumps, (o.theirs for o in reasoned)) if '"reasoning": "' in text]
    assert len(both) > 10, "what has no reasoning shows little"


def _texts(outcomes: Sequence[Outcome], model: str) -> list[Any]:
    return [
        outcome.theirs["body"]["choices"][0]["text"]
        for outcome in outcomes
        if outcome.case.path == "/v1/completions"
        and outcome.case.parameter == "an adapter"
        and outcome.case.body["model"] == model
        and not outcome.case.stream
    ]


@pytest.mark.parametrize("graph", ["aggregated", "disaggregated"])
async def test_pictures_are_seen_as_by_vllm_serve(graph: str, vllm_host: VllmHost, tmp_path: Path) -> None:
    from tests.vllm.make_tiny_blip import make_blip, picture

    made = make_blip(tmp_path / "blip", sorted((ROOT / "docs").glob("*.md")))
    pictures = [picture(1), picture(7), picture(3, (20, 200))]
    cases = model_cases.numbered(model_cases.of_pictures(pictures))
    setup = Setup(graph, workers=2 if graph == "aggregated" else 1)
    outcomes = await compared(replace(vllm_host, model=made), setup, tmp_path, cases)
    write_if_asked("models", f"pictures, {graph}", outcomes)
    assert unexpected(outcomes) == []
    named = ("/v1/chat/completions", model_cases.PICTURE)
    seen = [each.theirs["body"] for each in outcomes if (each.case.path, each.case.parameter) == named]
    assert len({body["choices"][0]["message"]["content"] for body in seen}) == len(pictures), "they look the same"


async def test_vectors_and_their_scores_are_those_of_vllm_serve(vllm_host: VllmHost, tmp_path: Path) -> None:
    setup = Setup(worker={"runner": "pooling"}, api={})
    outcomes = await compared(vllm_host, setup, tmp_path, model_cases.numbered(model_cases.of_vectors()))
    write_if_asked("models", "a model that embeds", outcomes)
    assert unexpected(outcomes) == []
    for path in ("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        assert answered(outcomes, path) >= 3, path


async def test_classes_are_those_of_vllm_serve(vllm_host: VllmHost, tmp_path: Path) -> None:
    host = host_of(vllm_host, tmp_path / "classifier", labels=3)
    setup = Setup(worker={"runner": "pooling"}, api={})
    outcomes = await compared(host, setup, tmp_path, model_cases.numbered(model_cases.of_classes()))
    write_if_asked("models", "a model that classifies", outcomes)
    assert unexpected(outcomes) == []
    for path in ("/classify", "/pooling"):
        assert answered(outcomes, path) >= 5, path


async def test_scores_of_a_cross_encoder_are_those_of_vllm_serve(vllm_host: VllmHost, tmp_path: Path) -> None:
    host = host_of(vllm_host, tmp_path / "crossing", labels=1)
    setup = Setup(worker={"runner": "pooling"}, api={})
    outcomes = await compared(host, setup, tmp_path, model_cases.numbered(model_cases.of_scores()))
    write_if_asked("models", "a cross-encoder", outcomes)
    assert unexpected(outcomes) == []
    for path in ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        assert answered(outcomes, path) >= 3, path
