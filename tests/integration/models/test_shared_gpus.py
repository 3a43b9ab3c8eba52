"""Several models on fewer GPUs than they need together, on real graphs: held, served, given back, never dropped."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
import yaml

from tests.drivers.models import FILE, ask, chat, of_models, row
from tests.drivers.served import Served, auntil, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

START_UP_S = 1.0
WAKE_S = 0.3
MODEL = {"model": "sim-tiny", "engine": "sim", "min-stay-s": 1.0, "sim": {"start-up-s": START_UP_S}}
CAN_SLEEP = {**MODEL, "standby": 0, "sim": {"start-up-s": START_UP_S, "sleep-s": 0.1, "wake-s": WAKE_S}}


@pytest.fixture(scope="module")
def three_on_two() -> Iterator[Served]:
    """Models a, b, c, which can sleep; two GPUs. They serve on without an arbiter."""
    models = {"a": {**CAN_SLEEP, "workers": 1}, "b": {**CAN_SLEEP, "workers": 1}, "c": CAN_SLEEP}
    with of_models(models, "sim:2", "--on-arbiter-death", "keep") as served:
        yield served.start()


def test_all_models_are_listed_and_each_answers_however_few_gpus_there_are(three_on_two: Served) -> None:
    listed = httpx.get(f"{three_on_two.url}/v1/models", timeout=30.0).json()["data"]
    assert {each["id"] for each in listed} == {"a", "b", "c"}
    for model in "abcabc":
        answer = ask(three_on_two, model)
        assert (answer.status_code, answer.json().get("model")) == (200, model)
    rows = three_on_two.status()["models"]
    assert sum(each["ready"] for each in rows) <= 2
    assert all(each["why"] for each in rows)
    shown = three_on_two.ok("status")
    assert "MODEL" in shown
    assert three_on_two.status()["state"] == "ready", "a model that nobody asks for lacks nothing"


@pytest.mark.full
def test_a_model_that_slept_answers_after_its_wake(three_on_two: Served) -> None:
    """All three have a process by now. One sleeps, and its GPU is another's."""
    for model in "abc":
        assert ask(three_on_two, model).status_code == 200
    asleep = until(lambda: next((each["model"] for each in three_on_two.status()["models"] if not each["ready"]), None))
    began_s = time.monotonic()
    assert ask(three_on_two, asleep).status_code == 200
    took_s = time.monotonic() - began_s
    until(lambda: row(three_on_two, asleep)["ready"])  # the Frontend may see its keys before the arbiter does
    assert took_s < 60.0


async def test_a_request_that_is_held_survives_the_arbiter_and_is_answered_after_adoption(three_on_two: Served) -> None:
    for model in "ab":
        await asyncio.to_thread(ask, three_on_two, model)
    cold = next(each["model"] for each in three_on_two.status()["models"] if not each["ready"])
    url = three_on_two.url
    three_on_two.kill_arbiter()
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        held = asyncio.create_task(client.post("/v1/chat/completions", json=chat(cold)))
        await asyncio.to_thread(three_on_two.adopt)
        answer = await held
        assert answer.status_code == 200, answer.text


def test_a_model_with_a_router_sends_a_prefix_where_it_is_cached() -> None:
    models = {"a": {**MODEL, "router": "kv", "floor": 2}, "b": MODEL}
    with of_models(models, "sim:3").started() as served:
        prompt = {"model": "a", "prompt": "one two three " * 60, "max_tokens": 2}
        answers = [httpx.post(f"{served.url}/v1/completions", json=prompt, timeout=60.0).json() for _ in range(4)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert min(cached[1:]) > 0.7 * answers[0]["usage"]["prompt_tokens"], "each went to the first one's worker"
        assert ask(served, "b").status_code == 200


# --- one GPU, workers that leave ------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_on_one() -> Iterator[Served]:
    """Models a and b, whose engines cannot sleep, on one GPU; idle ones give it back after two seconds."""
    models = {"a": {**MODEL, "idle-s": 2.0}, "b": {**MODEL, "idle-s": 2.0}}
    with of_models(models, "sim:1") as served:
        yield served.start()


async def test_a_switch_lets_streams_finish_and_holds_what_comes(two_on_one: Served) -> None:
    url = f"{two_on_one.url}/v1/chat/completions"
    async with (
        httpx.AsyncClient(timeout=120.0) as client,
        client.stream("POST", url, json=chat("a", 600, stream=True)) as long,
    ):
        lines = long.aiter_lines()
        await anext(lines)
        other = asyncio.create_task(client.post(url, json=chat("b")))
        await auntil(lambda: row(two_on_one, "b")["held"] == 1)
        rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        assert (await other).status_code == 200
    assert row(two_on_one, "a")["ready"] == 0


def test_a_model_that_nobody_uses_gives_its_gpu_back(two_on_one: Served) -> None:
    assert ask(two_on_one, "a").status_code == 200
    until(lambda: all(gpu["state"] == "free" for gpu in two_on_one.status()["gpus"]))
    assert two_on_one.status()["state"] == "ready"


@asynccontextmanager
async def asked_all_the_time(served: Served, model: str) -> AsyncIterator[list[int]]:
    """Four clients that ask for the model one request after the other; the status codes of the answers."""
    codes: list[int] = []
    url = f"{served.url}/v1/chat/completions"

    async def client() -> None:
        async with httpx.AsyncClient(timeout=120.0) as http:
            while True:
                codes.append((await http.post(url, json=chat(model, 20))).status_code)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    try:
        yield codes
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


@pytest.mark.full
async def test_models_are_added_and_removed_under_load() -> None:
    first = {"a": {**MODEL, "floor": 1}, "b": MODEL}
    with of_models(first, "sim:3").started() as served:
        file = served.cwd / FILE
        async with asked_all_the_time(served, "a") as codes:
            await auntil(lambda: len(codes) > 20)
            file.write_text(yaml.safe_dump({"Host": {"gpus": "sim:3"}, "Models": {**first, "c": MODEL}}))
            await asyncio.to_thread(served.ok, "apply", "-f", FILE, timeout_s=120.0)
            assert (await asyncio.to_thread(ask, served, "c")).status_code == 200
            file.write_text(yaml.safe_dump({"Host": {"gpus": "sim:3"}, "Models": {"a": first["a"], "c": MODEL}}))
            await asyncio.to_thread(served.ok, "apply", "-f", FILE, timeout_s=120.0)
            assert (await asyncio.to_thread(ask, served, "b")).status_code == 404
            seen = len(codes)
            await auntil(lambda: len(codes) > seen + 20)
        assert set(codes) == {200}
        assert {each["model"] for each in json.loads(served.ok("status", "--json"))["models"]} == {"a", "c"}


@pytest.mark.full
async def test_a_frontend_that_is_replaced_goes_on_answering_for_removed_models() -> None:
    """Two clients keep connections to it while a stream holds its drain up: one for each removed model.

    On a busy machine a connection may be closed meanwhile. The new Frontend then answers, which has never had `c`.
    """
    floor = {**MODEL, "floor": 1, "sim": {"start-up-s": 0.03, "speed": 0.03}}  # the stream takes 10 s
    with of_models({"a": floor, "b": floor, "c": MODEL}, "sim:2").started() as served:
        url = f"{served.url}/v1/chat/completions"
        async with (
            httpx.AsyncClient(timeout=60.0) as first,
            httpx.AsyncClient(timeout=60.0) as second,
            httpx.AsyncClient(timeout=60.0) as third,
            first.stream("POST", url, json=chat("b", 1500, stream=True)) as long,
        ):
            lines = long.aiter_lines()
            await anext(lines)
            for kept in (second, third):
                assert (await kept.post(url, json=chat("b"))).status_code == 200
            (served.cwd / FILE).write_text(yaml.safe_dump({"Host": {"gpus": "sim:2"}, "Models": {"a": floor}}))
            applied = asyncio.create_task(asyncio.to_thread(served.ok, "apply", "-f", FILE, timeout_s=120.0))
            await auntil(lambda: served.states()["Frontend"] == "draining", what=served.states)
            began_s = time.monotonic()
            gone = await third.post(url, json=chat("c"))
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
            assert time.monotonic() - began_s < 20.0, "not after its max-wait-s"
            assert (await second.post(url, json=chat("b"))).status_code == 200
            assert served.states()["Frontend"] == "draining", "the stream must outlast the requests"
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        await applied
        await auntil(lambda: "b" not in served.states(), what=served.states)
