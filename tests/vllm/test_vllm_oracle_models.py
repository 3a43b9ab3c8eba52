"""`vllm serve` beside a graph for what the plain tiny model does not do: vectors, classes, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.served import ROOT
from tests.vllm.hosts import VllmHost
from tests.vllm.oracle import model_cases
from tests.vllm.oracle.asking import Outcome
from tests.vllm.oracle.beside import Setup, compared, unexpected
from tests.vllm.oracle.report import write_if_asked

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(2400)]


def host_of(host: VllmHost, folder: Path, **more: Any) -> VllmHost:
    """The same with another tiny model."""
    from tests.vllm.make_tiny_model import make

    return replace(host, model=make(folder, sorted((ROOT / "docs").glob("*.md")), **more))


def answered(outcomes: Sequence[Outcome], path: str) -> int:
    """How many of them were no errors."""
    return sum(outcome.theirs["status"] == 200 for outcome in outcomes if outcome.case.path == path)


async def test_vectors_and_their_scores_are_those_of_vllm_serve(vllm_host: VllmHost, tmp_path: Path) -> None:
    """The tiny model's last hidden state: `/v1/embeddings`, `/pooling`, and what is made of two."""
    setup = Setup(worker={"runner": "pooling"}, api={})
    outcomes = await compared(vllm_host, setup, tmp_path, model_cases.numbered(model_cases.of_vectors()))
    write_if_asked("models", "a model that embeds", outcomes)
    assert unexpected(outcomes) == []
    for path in ("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        assert answered(outcomes, path) >= 3, path


async def test_classes_are_those_of_vllm_serve(vllm_host: VllmHost, tmp_path: Path) -> None:
    """Three of them."""
    host = host_of(vllm_host, tmp_path / "classifier", labels=3)
    setup = Setup(worker={"runner": "pooling"}, api={})
    outcomes = await compared(host, setup, tmp_path, model_cases.numbered(model_cases.of_classes()))
    write_if_asked("models", "a model that classifies", outcomes)
    assert unexpected(outcomes) == []
    for path in ("/classify", "/pooling"):
        assert answered(outcomes, path) >= 5, path


async def test_scores_of_a_cross_encoder_are_those_of_vllm_serve(vllm_host: VllmHost, tmp_path: Path) -> None:
    """A model with one class reads both texts at once."""
    host = host_of(vllm_host, tmp_path / "crossing", labels=1)
    setup = Setup(worker={"runner": "pooling"}, api={})
    outcomes = await compared(host, setup, tmp_path, model_cases.numbered(model_cases.of_scores()))
    write_if_asked("models", "a cross-encoder", outcomes)
    assert unexpected(outcomes) == []
    for path in ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        assert answered(outcomes, path) >= 3, path
