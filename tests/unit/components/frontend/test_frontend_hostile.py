"""Any filling in any field, of a size that a unit test can afford; `tests/integration/hostile` has the large ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, given, settings

from tests.drivers.hostile import Hostile, hostile_bodies
from tests.drivers.served import MODEL
from tests.fakes.data_plane.processor import FakeEndpoint, answer

Make = Callable[..., Any]
SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@given(hostile=hostile_bodies(200_000))
@example(hostile=Hostile("/v1/chat/completions", "model", "escapes", 1824))
@example(hostile=Hostile("/v1/completions", "model", "escapes", 512 * 6))
@example(hostile=Hostile("/v1/chat/completions", "model", "emoji", 512 * 4))
@SETTINGS
def test_a_hostile_body_is_answered_or_refused(house: Make, serve_model: Make, hostile: Hostile):
    """Never a failure of ours; a refusal is short, in OpenAI's format, and never reaches the Processor."""
    asyncio.run(_ask(house, serve_model, hostile))


async def _ask(house: Make, put_model: Make, hostile: Hostile) -> None:
    made = house(FakeEndpoint(answer("Hi")))
    put_model(made.models, MODEL)
    async with made.client() as client:
        response = await client.post(hostile.path, content=hostile.body(), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert len(response.content) < 2000
        assert json.loads(response.content)["error"]["type"] == "invalid_request_error"
        assert made.endpoint.payloads == []
