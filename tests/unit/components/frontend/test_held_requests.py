"""Requests for a model without a worker: held in order and within bounds, answered when a worker comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import held as held_module
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.held import HeldRequests, held_key
from dynamo_local.components.openai.settings import SharedModel
from dynamo_local.core.gpu_shares import HeldNow
from dynamo_local.errors import NoWorkers, WorkerLost
from dynamo_local.ports import DeleteEvent
from tests.drivers.eventually import eventually
from tests.fakes.arbiter.hand_clock import HandClock
from tests.fakes.data_plane.processor import FakeEndpoint, answer
from tests.fakes.infra.etcd import FakeEtcd

COLD, WARM = "cold", "sim-Model"
URL = "/v1/chat/completions"
BOUNDS = {"component": COLD, "max_wait_s": 30.0, "max_held": 3, "max_held_bytes": 100_000}
Make = Callable[..., Any]


def body(text: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": COLD, "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
def shared(house: Make) -> Make:
    """`shared(endpoint, **bounds)`: a Frontend that holds requests for the model COLD."""

    def make(endpoint: FakeEndpoint | None = None, clock: Clock | None = None, **bounds: Any) -> Any:
        made = house(endpoint)
        models = {COLD: SharedModel(**{**BOUNDS, **bounds})}
        clock = clock or AsyncioClock()
        held = HeldRequests(models, made.models, None, clock)
        made.deps = replace(made.deps, held=held, clock=clock)
        made.app = create_app(made.deps)
        return made

    return make


def count(made: Any) -> int:
    now = made.deps.held.now()
    return now[COLD].count if COLD in now else 0


async def test_requests_wait_for_a_worker_and_go_on_in_their_order(shared: Make, serve_model: Make) -> None:
    made = shared()
    async with made.client() as client:
        asked = []
        for n in range(3):
            asked.append(asyncio.create_task(client.post(URL, json=body(str(n)))))
            await eventually(lambda n=n: count(made) == n + 1)
        assert made.endpoint.payloads == []
        serve_model(made.models, COLD)
        assert {(await each).status_code for each in asked} == {200}
    assert [each["messages"][0]["content"] for each in made.endpoint.payloads] == ["0", "1", "2"]
    assert count(made) == 0


async def test_another_models_requests_do_not_wait(shared: Make) -> None:
    made = shared()
    async with made.client() as client:
        assert (await client.post(URL, json={**body(), "model": WARM})).status_code == 200
        assert (await client.post(URL, json={**body(), "model": "nobody"})).status_code == 404


@pytest.mark.parametrize("bounds", [{"max_held": 1}, {"max_held_bytes": 100}])
async def test_beyond_its_bounds_a_request_is_to_come_back(shared: Make, serve_model: Make, bounds: Any) -> None:
    made = shared(**bounds)
    async with made.client() as client:
        first = asyncio.create_task(client.post(URL, json=body()))
        await eventually(lambda: count(made) == 1)
        refused = await client.post(URL, json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_served")
        assert int(refused.headers["retry-after"]) >= 1
        serve_model(made.models, COLD)
        assert (await first).status_code == 200


async def test_a_request_that_waited_too_long_says_why(shared: Make) -> None:
    async with shared(max_wait_s=0.05).client() as client:
        late = await client.post(URL, json=body())
    assert late.status_code == 503
    assert "had no worker within 0 s" in late.json()["error"]["message"]


async def test_held_requests_end_at_once_when_their_model_is_removed(shared: Make, serve_model: Make) -> None:
    made = shared()
    async with made.client() as client:
        asked = [asyncio.create_task(client.post(URL, json=body(stream=stream))) for stream in (False, True)]
        await eventually(lambda: count(made) == 2)
        assert await made.deps.held.let_go({"components": ["another"]}) == {"let_go": 0}
        assert count(made) == 2
        assert await made.deps.held.let_go({"components": [COLD]}) == {"let_go": 2}
        plain, streamed = [await each for each in asked]
        assert (plain.status_code, plain.json()["error"]["code"]) == (404, "model_not_found")
        assert "was removed (`dynamo apply`)" in plain.json()["error"]["message"]
        assert "was removed (`dynamo apply`)" in streamed.text
        assert count(made) == 0
        later = asyncio.create_task(client.post(URL, json=body()))  # another apply has brought the model back
        await eventually(lambda: count(made) == 1)
        serve_model(made.models, COLD)
        assert (await later).status_code == 200


async def test_a_client_that_leaves_takes_its_request_along(shared: Make) -> None:
    made = shared()
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        asked = asyncio.create_task(client.post(URL, json=body()))
        await eventually(lambda: count(made) == 1)
        asked.cancel()
        await eventually(lambda: count(made) == 0)
    assert made.endpoint.payloads == []


async def test_a_stream_gets_comments_until_it_begins(
    shared: Make, serve_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "KEEP_ALIVE_S", 0.02)
    made, seen = shared(), []
    async with (
        made.served() as server,
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", URL, json=body(stream=True)) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith(":") and not seen:
                serve_model(made.models, COLD)
            seen.append(line)
    assert response.status_code == 200
    assert seen[0].startswith(": waiting")
    assert seen[-2] == "data: [DONE]"


async def test_a_stream_that_waited_in_vain_ends_with_an_error_event(
    shared: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "KEEP_ALIVE_S", 0.01)
    async with shared(max_wait_s=1.0).client() as client:
        response = await client.post(URL, json=body(stream=True))
    assert response.status_code == 200, "the head was sent with the first comment"
    assert '"code":"not_served"' in response.text
    assert "[DONE]" not in response.text


async def test_a_worker_that_left_in_between_costs_nobody_an_error(shared: Make, serve_model: Make) -> None:
    made = shared(FakeEndpoint(NoWorkers("it has just left"), answer("Hello")))
    key = serve_model(made.models, COLD)
    async with made.client() as client:
        asked = asyncio.create_task(client.post(URL, json=body()))
        await eventually(lambda: made.endpoint.calls)
        made.models.apply(DeleteEvent(key))
        await eventually(lambda: count(made) == 1)
        serve_model(made.models, COLD)
        assert (await asked).status_code == 200


async def test_a_request_whose_worker_was_lost_is_held_from_then_on(shared: Make, serve_model: Make) -> None:
    """It ran for longer than it may be held. The next worker is told that one was lost with it."""
    lost, gate, clock = WorkerLost("it died", lost=1), asyncio.Event(), HandClock()
    made = shared(FakeEndpoint([gate, lost], [NoWorkers("none is left")], answer("Hello")), clock, max_wait_s=5.0)
    serve_model(made.models, COLD)
    async with made.client() as client:
        asked = asyncio.create_task(client.post(URL, json=body()))
        await eventually(lambda: made.endpoint.calls)
        clock.at_s += 6.0
        gate.set()
        assert (await asked).status_code == 200
    assert [payload.get("lost") for payload in made.endpoint.payloads] == [None, 1, 1]


async def test_models_are_listed_with_their_state(shared: Make, serve_model: Make) -> None:
    made = shared()
    async with made.client() as client:
        listed = {each["id"]: each.get("state") for each in (await client.get("/v1/models")).json()["data"]}
        assert listed == {WARM: None, COLD: "asleep"}
        shown = (await client.get(f"/v1/models/{COLD}")).json()
        assert (shown["state"], shown["object"]) == ("asleep", "model")
        assert shown["created"] > 1_600_000_000, "OpenAI's clients want it"
        serve_model(made.models, COLD)
        assert "state" not in (await client.get(f"/v1/models/{COLD}")).json()


# --- telling the arbiter ---------------------------------------------------------------------------


async def told(etcd: FakeEtcd, key: str, held: dict[str, HeldNow] | None) -> int:
    """Wait until the key says this (None: until it is gone); its lease."""
    async with asyncio.timeout(10.0):
        while True:
            kv = await etcd.get(key)
            if (None if kv is None else msgspec.json.decode(kv.value, type=dict[str, HeldNow])) == held:
                return 0 if kv is None else kv.lease_id
            await asyncio.sleep(0.001)


async def test_the_arbiter_is_told_through_a_key_that_goes_with_the_requests() -> None:
    """It outlives the Frontend's own lease, which a Frontend that leaves gives back first."""
    etcd, models = FakeEtcd(), ModelsView("dynamo")
    lease_id = await etcd.grant(10)
    context: Any = SimpleNamespace(namespace="dynamo", watcher_name="dynamo_Frontend", kv=etcd, lease_id=lease_id)
    held = HeldRequests({COLD: SharedModel(**{**BOUNDS, "component": "cold_workers"})}, models, None, AsyncioClock())
    telling = asyncio.create_task(held.tell(context))
    since_s = AsyncioClock().now_s()
    waiting = asyncio.create_task(held.until_served(COLD, 10, since_s, None))
    key = held_key(context.namespace, context.watcher_name)
    lease_of_key = await told(etcd, key, {"cold_workers": HeldNow(1, since_s)})
    await etcd.revoke(lease_id)
    second = asyncio.create_task(held.until_served(COLD, 10, since_s, None))
    assert await told(etcd, key, {"cold_workers": HeldNow(2, since_s)}) == lease_of_key
    await etcd.revoke(lease_of_key)
    assert await told(etcd, key, {"cold_workers": HeldNow(2, since_s)}) != lease_of_key
    second.cancel()
    waiting.cancel()
    await told(etcd, key, None)
    telling.cancel()
