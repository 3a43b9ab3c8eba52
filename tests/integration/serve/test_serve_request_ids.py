"""A client's `x-request-id` in the logs of every worker that its request passed (issue 11, fault 7 of section 3)."""

from __future__ import annotations

import httpx
import pytest

from tests.drivers.served import MODEL, Served, auntil, messages

pytestmark = pytest.mark.infra

PASSED = ("Frontend", "Processor", "VllmWorker", "PrefillWorker")


def about(served: Served, watcher: str, x_request_id: str) -> list[str]:
    """The lines of that worker's log that carry the id."""
    return [line for line in served.log(watcher).splitlines() if f"[{x_request_id}]" in line]


async def ask(served: Served, prompt: str, **headers: str) -> httpx.Response:
    """One chat, not streamed, with these headers."""
    body = {"model": MODEL, "messages": messages(prompt), "max_tokens": 8}
    async with httpx.AsyncClient(base_url=served.url, timeout=30.0) as client:
        return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_the_clients_request_id_is_in_the_logs_of_every_worker(disagg: Served) -> None:
    """docs/api.md promised it, and it was in none: whoever looks for a slow request had nothing to go by."""
    x_request_id = "order/4711:a%20b"
    prompt = "a prompt above the threshold of ten tokens, so that it is certainly prefilled by the other worker"
    answer = await ask(disagg, prompt, **{"x-request-id": x_request_id})

    assert (answer.status_code, answer.headers["x-request-id"]) == (200, x_request_id)
    for watcher in PASSED:
        await auntil(lambda watcher=watcher: about(disagg, watcher, x_request_id), what=lambda: disagg.log("Frontend"))
    # Also the lines that say something of a request without naming it (here: why it was prefilled elsewhere).
    assert any("Remote prefill" in line for line in about(disagg, "VllmWorker", x_request_id))


async def test_an_id_that_a_log_cannot_carry_is_replaced(disagg: Served) -> None:
    """One that would break lines, or fill the disk, is not taken: the answer names the one that the logs have."""
    answer = await ask(disagg, "hello there", **{"x-request-id": "x" * 5000})

    made = answer.headers["x-request-id"]
    assert len(made) == 32
    await auntil(lambda: about(disagg, "Frontend", made), what=lambda: disagg.log("Frontend"))
    assert "x" * 129 not in disagg.log("Frontend")
