"""Several servers that are commands (`runtime: http`) on fewer GPUs than they need together: as models of engines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.drivers.models import ask, chat, of_models, row
from tests.drivers.served import ROOT, Served, auntil, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

SERVER = f"{sys.executable} {ROOT}/tests/tools/openai_server.py --port {{port:http}}"


def command(model: str, **more: object) -> dict[str, object]:
    """A model whose server calls it so; without metrics, as most servers are."""
    return {"command": f"{SERVER} --model {model} --token-s 0.02", "metrics": None, "min-stay-s": 1.0, **more}


@pytest.fixture(scope="module")
def two_on_one() -> Iterator[Served]:
    """Servers a and b, and one GPU. The first has two names."""
    with of_models({"a": command("a"), "b": command("b")}, "sim:1") as made:
        yield made.start()


def test_each_answers_in_its_turn(two_on_one: Served) -> None:
    listed = httpx.get(f"{two_on_one.url}/v1/models", timeout=30.0).json()["data"]
    assert {each["id"] for each in listed} == {"a", "b"}
    for model in "abab":
        answer = ask(two_on_one, model)
        assert answer.status_code == 200, answer.text
        assert (row(two_on_one, model)["ready"], two_on_one.status()["state"]) == (1, "ready")
    unknown = ask(two_on_one, "c")
    assert unknown.status_code == 404


async def test_a_switch_lets_a_stream_finish_and_a_held_client_gets_comments(two_on_one: Served) -> None:
    """The server has no metrics: only its Frontend's requests tell that it is busy."""
    url = f"{two_on_one.url}/v1/chat/completions"
    async with (
        httpx.AsyncClient(timeout=120.0) as client,
        client.stream("POST", url, json=chat("a", 400, stream=True)) as long,
    ):
        lines = long.aiter_lines()
        await anext(lines)
        await auntil(lambda: row(two_on_one, "a")["ready"] == 1)

        async def other() -> list[str]:
            async with client.stream("POST", url, json=chat("b", stream=True)) as answer:
                return [line async for line in answer.aiter_lines()]

        waiting = asyncio.create_task(other())
        await auntil(lambda: row(two_on_one, "b")["held"] == 1)
        rest = [line for line in [each async for each in lines] if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"content"' in line for line in rest) >= 399
        answered = await waiting
        assert answered[0].startswith(": waiting")
        assert [line for line in answered if line][-1] == "data: [DONE]"


@pytest.mark.full
def test_hooks_put_a_command_to_sleep_in_its_turn() -> None:
    """Both servers stay as processes; the GPU goes to and fro between them."""
    hooks = {"standby": 0, "sleep-hook": "true", "wake-hook": "true"}
    with of_models({"a": command("a", **hooks), "b": command("b", **hooks)}, "sim:1").started() as graph:
        for model in "abab":
            answer = ask(graph, model)
            assert answer.status_code == 200, answer.text
        until(lambda: {each["ready"] + each["asleep"] for each in graph.status()["models"]} == {1})


def test_a_server_that_has_another_name_for_its_model_says_so() -> None:
    with of_models({"a": command("b", floor=1)}, "sim:1") as graph:
        done = graph.cli(*graph.serve_words("--start-deadline", "20"))
        log = graph.log("a")
        assert done.returncode != 0
        assert "the server calls its models b, and requests come for a" in log
        assert "--served-model-name a" in log
