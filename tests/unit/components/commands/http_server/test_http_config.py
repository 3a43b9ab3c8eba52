"""The section of a service with `runtime: http`, and the list of models that a server gives."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dynamo_local.components.commands.http_server import HttpConfig, Model, parse_models
from dynamo_local.core.types import Role

COMMAND = "vllm serve {model} --port {port:http}"


def section(**keys: Any) -> HttpConfig:
    return HttpConfig(**{"command": COMMAND, "runtime": "http", "model": "m", "role": "decode", **keys})


def test_a_server_has_health_and_metrics_where_vllm_and_sglang_have_them() -> None:
    made = section()
    assert (made.health, made.metrics, made.role, made.served_model_name) == (
        "/health",
        "/metrics",
        Role.DECODE,
        None,
    )
    assert section(metrics=None).metrics is None


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"command": "vllm serve m --port 8000"}, "{port:http}"),
        ({"health": "health"}, "health must be a path"),
        ({"metrics": "http://127.0.0.1/metrics"}, "metrics must be a path"),
        ({"role": "frontend"}, "our own Frontend"),
        ({"served_model_name": ""}, "served_model_name"),
    ],
)
def test_a_section_that_cannot_work_is_refused(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError) as refused:
        section(**keys)
    assert word in str(refused.value)


def test_models_come_with_their_lengths_where_the_server_says_them() -> None:
    text = '{"object":"list","data":[{"id":"m","created":5,"max_model_len":4096},{"id":"lora","root":"m"}]}'
    assert parse_models(text) == (Model("m", 4096, 5.0), Model("lora", None, 0.0))


@pytest.mark.parametrize("text", ["", "<html>", "[]", '{"data": 3}', '{"data": [{}]}', '{"data": ["m"]}'])
def test_what_is_no_list_of_models_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no list of models"):
        parse_models(text)
