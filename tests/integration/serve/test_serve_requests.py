"""Requests through the shipped graphs, end to end, by the `openai` client: every text is held against the oracle."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.drivers.endpoint_client import endpoint_client
from tests.drivers.served import AGG, MODEL, Served, asking, auntil, expected, messages, stream_chat, tokenizer

pytestmark = pytest.mark.infra

CLIENT = Path(__file__).parents[3] / "examples" / "llm" / "client.py"
STREAMS = 200
LOGGING = ("Frontend", "VllmWorker", "PrefillWorker")
"""Those that a request passes whose prefill is done elsewhere."""


async def test_chats_completions_and_models(disagg: Served) -> None:
    text, reason = expected("Tell me of the sea.", 32)
    async with disagg.client() as client:
        answer = await client.chat.completions.create(**asking("Tell me of the sea.", 32))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, reason)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 32
        assert await stream_chat(client, "Sing me a song.", 48) == expected("Sing me a song.", 48)
        completion = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
        assert completion.usage is not None
        assert (completion.object, completion.usage.completion_tokens) == ("text_completion", 8)
        assert [model.id async for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize("ending", ["", "/", "/v1"])
def test_the_examples_client_takes_the_address_as_status_says_it(disagg: Served, ending: str) -> None:
    words = ["Tell me of the sea.", "--url", disagg.url + ending, "--max-tokens", "8"]
    done = subprocess.run(
        [sys.executable, str(CLIENT), *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[8 tokens in" in done.stderr


@pytest.mark.full
async def test_chat_of_the_aggregated_graph() -> None:
    with Served(target=AGG).started() as agg:
        async with agg.client() as client:
            assert await stream_chat(client, "Alone at last.", 32) == expected("Alone at last.", 32)


async def test_prefill_really_happens_elsewhere(disagg: Served) -> None:
    prompt = "a prompt that is certainly longer than ten tokens, and that nobody has asked before this test"
    before = await _prefills(disagg)
    async with disagg.client() as client:
        text = (await client.chat.completions.create(**asking(prompt, 16))).choices[0].message.content
    assert text == expected(prompt, 16)[0]
    length = len(tokenizer().encode_chat(messages(prompt)))
    decision = rf"Remote prefill: True \(prefill length: {length}/{length}, prefill queue size: 0/2\)"
    assert re.search(decision, disagg.log("VllmWorker")), disagg.log("VllmWorker")
    assert await _prefills(disagg) == before + 1


async def _prefills(served: Served) -> int:
    """Entries that the prefill worker has finished, by its own count."""
    async with endpoint_client(served, "PrefillWorker", "status") as client:
        await client.wait_for_instances(5.0)
        stream = await client.call(None)
        return sum([item["done"] async for item in stream])


async def test_200_concurrent_streams_are_all_right(disagg: Served) -> None:
    prompts = [f"Stream number {n}: tell me a story about the number {n * n}." for n in range(STREAMS)]
    async with disagg.client() as client:
        answers = await asyncio.gather(*(stream_chat(client, prompt, 24) for prompt in prompts))
    wrong = [prompt for prompt, answer in zip(prompts, answers, strict=True) if answer != expected(prompt, 24)]
    assert wrong == []


async def test_a_client_that_goes_away_frees_its_slot(disagg: Served) -> None:
    async with disagg.client() as client:
        stream = await client.chat.completions.create(
            **asking("I shall not wait for this.", 5000, ignore_eos=True), stream=True
        )
        async with stream:
            async for _ in stream:
                break

        def idle() -> bool:
            load = disagg.worker("VllmWorker")["load"]
            return load is not None and load["request_active_slots"] == 0

        await auntil(idle, 5.0, what=lambda: disagg.worker("VllmWorker"))


async def test_frontend_metrics_count_the_requests(disagg: Served) -> None:
    async with disagg.client() as client:
        await client.chat.completions.create(**asking("Count me.", 4))
    async with httpx.AsyncClient(base_url=disagg.url) as http:
        metrics = (await http.get("/metrics")).text
        health = await http.get("/health")
    assert re.search(r"dynamo_frontend_requests_total\{.*\} [1-9]", metrics)
    assert "dynamo_frontend_time_to_first_token_seconds_count" in metrics
    assert (health.status_code, health.json()["status"]) == (200, "ready")


def _about(served: Served, watcher: str, x_request_id: str) -> list[str]:
    """The lines of that worker's log that carry the id."""
    return [line for line in served.log(watcher).splitlines() if f"[{x_request_id}]" in line]


async def _ask(served: Served, prompt: str, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "messages": messages(prompt), "max_tokens": 8}
    async with httpx.AsyncClient(base_url=served.url, timeout=30.0) as client:
        return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_the_clients_request_id_is_in_the_logs_of_every_worker(disagg: Served) -> None:
    x_request_id = "order/4711:a%20b"
    prompt = "a prompt above the threshold of ten tokens, so that it is certainly prefilled by the other worker"
    answer = await _ask(disagg, prompt, **{"x-request-id": x_request_id})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, x_request_id)
    for watcher in LOGGING:
        await auntil(lambda watcher=watcher: _about(disagg, watcher, x_request_id), what=lambda: disagg.log("Frontend"))
    # Also the lines that say something of a request without naming it (here: why it was prefilled elsewhere).
    assert any("Remote prefill" in line for line in _about(disagg, "VllmWorker", x_request_id))
