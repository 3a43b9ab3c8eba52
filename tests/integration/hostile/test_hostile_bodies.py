"""Bodies up to the largest that is taken, made to cost more than their size, against a graph that serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from dynamo_local.components.openai.settings import FrontendConfig
from tests.drivers.endpoint_client import endpoint_client
from tests.drivers.hostile import (
    MSGPACK_FILLINGS,
    PROCESSOR_FIELDS,
    Hostile,
    Watched,
    ask_and_forget,
    hostile_bodies,
    resident_mib,
    watching,
)
from tests.drivers.served import AGG, MODEL, Served, auntil, until
from tests.tools.examples import examples

pytestmark = [pytest.mark.infra, pytest.mark.alone, pytest.mark.timing, pytest.mark.timeout(540)]

MAX_BODY_BYTES = FrontendConfig().max_body_bytes
FRONTEND, PROCESSOR, UNTOUCHED = "Frontend", "Processor", "VllmWorker"
NAMES = (FRONTEND, PROCESSOR, UNTOUCHED)
MORE_MIB = 64.0
LAG_S = 0.25
ANSWER_S = 120.0
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SETTINGS = settings(
    max_examples=examples(12),
    # In the place of the profile's in `tests/conftest.py`, not beside them.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=(
        Phase.explicit,
        Phase.generate,
    ),  # a body that is too costly is told as it is: smaller ones may cost nothing
)
TRIES = 3
"""A stall that a body causes comes every time, one of a busy machine does not."""


@pytest.fixture(scope="module")
def agg() -> Iterator[Served]:
    """The shipped aggregated graph; it has done each kind of work once."""
    with Served("--Frontend.ServiceArgs.colocate=[]", target=AGG).started() as served:
        asyncio.run(_warm_up(served))
        yield served


@pytest.fixture(scope="module")
def before_mib(agg: Served) -> dict[str, float]:
    return resident_mib(agg, NAMES)


async def _warm_up(served: Served) -> None:
    text = "A long and honest story. " * 8000
    async with httpx.AsyncClient(base_url=served.url, timeout=ANSWER_S) as client:
        chat = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        assert (await client.post(CHAT, json=chat)).status_code == 200
        ids = {"model": MODEL, "max_tokens": 2, "prompt": [300] * 50_000}
        assert (await client.post(COMPLETION, json=ids)).status_code == 200
    async with watching(served, NAMES) as seen:
        await auntil(lambda: seen.streams >= 2, ANSWER_S)


async def _post(served: Served, hostile: Hostile) -> tuple[httpx.Response, Watched]:
    body = hostile.body()
    headers = {"content-type": "application/json"}
    async with watching(served, NAMES) as seen:
        answer = await asyncio.to_thread(
            httpx.post, served.url + hostile.path, content=body, headers=headers, timeout=ANSWER_S
        )
        streams = seen.streams
        await auntil(lambda: seen.streams >= streams + 2, ANSWER_S)
    return answer, seen


def _lags(seen: Watched) -> list[str]:
    return [name for name in (FRONTEND, PROCESSOR) if seen.lag_s(name, UNTOUCHED) >= LAG_S]


def _is_well(served: Served, tries: list[Watched], before_mib: dict[str, float]) -> None:
    assert [text for seen in tries for text in seen.wrong] == []
    assert _lags(tries[-1]) == [], tries
    # Pages go back when the last object in them does, which may be a moment after the answer.
    until(
        lambda: all(mib < before_mib[name] + MORE_MIB for name, mib in resident_mib(served, NAMES).items()),
        what=lambda: (before_mib, resident_mib(served, NAMES), tries),
    )


@given(hostile=hostile_bodies(MAX_BODY_BYTES))
@example(hostile=Hostile(CHAT, "stop", "long string", 100_000))
@example(hostile=Hostile(CHAT, "stop", "long string", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(CHAT, "messages", "messages", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(CHAT, "messages", "parts", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(CHAT, "metadata", "empty lists", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(CHAT, "no such parameter", "long string", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(COMPLETION, "prompt", "words", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(COMPLETION, "prompt", "numbers", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(COMPLETION, "prompt", "empty lists", MAX_BODY_BYTES - 1024))
@example(hostile=Hostile(COMPLETION, "", "many keys", MAX_BODY_BYTES - 1024))
@SETTINGS
def test_a_body_costs_the_frontend_and_the_processor_no_more_than_its_size(
    agg: Served, before_mib: dict[str, float], hostile: Hostile
) -> None:
    tries: list[Watched] = []
    while not tries or (_lags(tries[-1]) and len(tries) < TRIES):
        answer, seen = asyncio.run(_post(agg, hostile))
        tries.append(seen)
        assert answer.status_code in (200, 400), answer.text[:500]
        if answer.status_code == 400:
            assert len(answer.content) < 2000
            assert answer.json()["error"]["type"] == "invalid_request_error"
    _is_well(agg, tries, before_mib)


async def _send(served: Served, endpoint: str, name: str, value: bytes) -> tuple[str, Watched]:
    payload = {"model": MODEL, "max_tokens": 2, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    payload[name] = msgspec.Raw(value)
    async with endpoint_client(served, "Processor", endpoint) as client, watching(served, NAMES) as seen:
        await client.wait_for_instances(ANSWER_S)
        ended = await ask_and_forget(client.call(payload, timeout_s=ANSWER_S))
        streams = seen.streams
        await auntil(lambda: seen.streams >= streams + 2, ANSWER_S)
    return ended, seen


@given(
    endpoint=st.sampled_from(["chat/completions", "completions"]),
    name=st.sampled_from(PROCESSOR_FIELDS),
    filling=st.sampled_from(list(MSGPACK_FILLINGS)),
    size=st.sampled_from([100_000, MAX_BODY_BYTES - 1024]),
)
@example(endpoint="chat/completions", name="stop", filling="long string", size=MAX_BODY_BYTES - 1024)
@example(endpoint="chat/completions", name="messages", filling="messages", size=MAX_BODY_BYTES - 1024)
@example(endpoint="completions", name="prompt", filling="long string", size=MAX_BODY_BYTES - 1024)
@example(endpoint="completions", name="prompt", filling="numbers", size=MAX_BODY_BYTES - 1024)
@example(endpoint="completions", name="else", filling="empty lists", size=MAX_BODY_BYTES - 1024)
@SETTINGS
def test_a_payload_costs_the_processor_no_more_than_its_size(
    agg: Served, before_mib: dict[str, float], endpoint: str, name: str, filling: str, size: int
) -> None:
    tries: list[Watched] = []
    while not tries or (_lags(tries[-1]) and len(tries) < TRIES):
        ended, seen = asyncio.run(_send(agg, endpoint, name, MSGPACK_FILLINGS[filling](size)))
        tries.append(seen)
        assert ended in ("", "InvalidRequest")
    _is_well(agg, tries, before_mib)
