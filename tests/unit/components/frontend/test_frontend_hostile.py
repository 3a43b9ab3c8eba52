"""Any filling in any field, of a size that a unit test can afford; `tests/integration/hostile` has the large ones."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, example, given, settings

from dynamo_local.system import collector
from tests.drivers.hostile import Hostile, hostile_bodies
from tests.drivers.served import MODEL
from tests.fakes.data_plane.processor import FakeEndpoint, Step, answer

Make = Callable[..., Any]
SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@given(hostile=hostile_bodies(200_000))
@example(hostile=Hostile("/v1/chat/completions", "model", "escapes", 1824))
@example(hostile=Hostile("/v1/completions", "model", "escapes", 512 * 6))
@example(hostile=Hostile("/v1/completions", "prompt", "long strings", 2006))
@example(hostile=Hostile("/v1/chat/completions", "model", "emoji", 512 * 4))
@SETTINGS
def test_a_hostile_body_is_answered_or_refused(house: Make, serve_model: Make, hostile: Hostile):
    asyncio.run(_ask(house, serve_model, hostile))


async def test_a_refused_request_leaves_nothing_of_ours_to_the_garbage_collector(house: Make):
    """It comes by seldom while a process serves: an error that held the frames with the body would hold that, too."""
    body = Hostile("/v1/chat/completions", "stop", "long string", 1000).body()
    async with house().client() as client:
        gc.collect()
        with collector.paused():
            response = await client.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                gc.collect()
            finally:
                gc.set_debug(0)
            frames = [each.f_code.co_qualname for each in gc.garbage if isinstance(each, FrameType)]
            gc.garbage.clear()
    assert response.is_client_error
    assert frames == []


async def _ask(house: Make, put_model: Make, hostile: Hostile) -> None:
    made = house(FakeEndpoint(_answered))
    put_model(made.models, MODEL)
    async with made.client() as client:
        response = await client.post(hostile.path, content=hostile.body(), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert len(response.content) < 2000
        assert json.loads(response.content)["error"]["type"] == "invalid_request_error"
        assert made.endpoint.payloads == []


def _answered(payload: dict[str, Any]) -> list[Step]:
    """As the Processor: the items of several prompts say whose they are."""
    prompts = payload.get("extras", {}).get("prompts")
    if prompts is None:
        return answer("Hi")
    steps = [step for step in answer("Hi") if isinstance(step, list)]
    return [[{**item, "index": number} for item in step] for number in range(len(prompts)) for step in steps]
