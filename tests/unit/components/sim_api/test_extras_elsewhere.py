"""A request with extras that is repeated elsewhere, or prefilled elsewhere, is the same request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from dynamo_local.components.prefill_worker import PrefillWorker, PrefillWorkerConfig
from dynamo_local.components.processor import Processor, ProcessorConfig
from dynamo_local.components.sim_api.choices import Choice, Choices, Script
from dynamo_local.components.sim_api.requests import Extras, Form, FunctionTool, Tools
from dynamo_local.components.text.prepare import Prepared
from dynamo_local.components.text.tokenizer import load_tokenizer
from dynamo_local.components.vllm_worker import VllmWorker, VllmWorkerConfig
from dynamo_local.errors import EngineDead
from dynamo_local.ports import SamplingParams
from dynamo_local.transport.requests.stream import MAX_WAITING
from tests.fakes.data_plane.worker_context import FakeCluster

FAST = {"speed": 200.0, "num_gpu_blocks": 4096, "block_size": 16}
LONG = "A prompt that is long enough for another worker to prefill. " * 4
REQUESTS = [
    Extras(n=3, logprobs=2),
    Extras(
        form=Form(
            "response_format", json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        )
    ),
    Extras(tools=Tools([FunctionTool("f", parameters={"type": "object"})], "required")),
    Extras(prompts=[LONG, LONG + "And another."], echo=True, logprobs=1),
]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """Closed at the end."""
    made = FakeCluster(ack_wait_s=0.3)
    yield made
    await made.close()


async def ask(cluster: FakeCluster, extras: Extras) -> list[Any]:
    """All that is said of each choice, in the order of the choices; a call's id is the request's own."""
    chat = extras.prompts is None
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]} if chat else {}
    body = {"request_id": "r", "max_tokens": 40, "seed": 7, **prompt, "extras": msgspec.to_builtins(extras)}
    stream = await cluster.client("Processor", "chat/completions" if chat else "completions").call(body, timeout_s=20)
    said: dict[int, list[Any]] = {}
    usage = None
    async for item in stream:
        choice = said.setdefault(item["index"], ["", "", [], None])
        choice[0] += item["text"]
        choice[1] += item.get("call", ("",))[-1]
        choice[2] += item.get("logprobs", ())
        choice[3] = item["finish_reason"] or choice[3]
        usage = item["usage"] or usage
    assert usage is not None
    return [*sorted(said.items()), usage["completion_tokens"], usage["prompt_tokens"]]


async def test_a_prefill_elsewhere_changes_no_answer(cluster: FakeCluster):
    await cluster.start(Processor, ProcessorConfig(router="round-robin"))
    alone = await cluster.start(VllmWorker, VllmWorkerConfig(remote_prefill=False, sim=FAST))
    expected = [await ask(cluster, extras) for extras in REQUESTS]
    prefill = await cluster.start(PrefillWorker, PrefillWorkerConfig(sim=FAST))
    await cluster.start(VllmWorker, VllmWorkerConfig(remote_prefill=True, conditional_disagg=False, sim=FAST))
    await alone.drain()
    assert [await ask(cluster, extras) for extras in REQUESTS] == expected
    assert (await prefill.instance.status())["done"] == 7  # of 3 + 1 + 1 + 2 generations


async def test_a_worker_that_dies_at_once_changes_no_answer(cluster: FakeCluster):
    await cluster.start(Processor, ProcessorConfig(router="round-robin"))
    await cluster.start(VllmWorker, VllmWorkerConfig(remote_prefill=False, sim=FAST))
    expected = [await ask(cluster, extras) for extras in REQUESTS]
    bad = await cluster.start(
        VllmWorker, VllmWorkerConfig(remote_prefill=False, sim={**FAST, "fail_after_requests": 1})
    )
    assert [await ask(cluster, extras) for extras in REQUESTS] == expected
    died = await asyncio.gather(*bad.context.vital_tasks, return_exceptions=True)
    assert any(isinstance(error, EngineDead) for error in died)


async def test_a_consumer_that_was_full_when_a_worker_was_lost_is_given_the_next_workers_items():
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    taken: list[Any] = []

    def full_once(items: list[Any]) -> Any:
        taken.extend(items)
        return room if len(taken) == 1 else None

    async def generate(_payload: Any, _answer: Any, take: Any) -> None:
        while (full := take([{"usage": None}])) is None:
            pass
        first = asyncio.ensure_future(full)
        await asyncio.sleep(0)
        first.cancel()  # the first worker is lost, and its stream ends
        await asyncio.wait([first])
        room.set_result(None)
        if (second := take([{"usage": None}])) is not None:
            await asyncio.wait_for(second, 1.0)

    prepared = Prepared("r", [1], SamplingParams(max_tokens=1), ())
    choice = Choice(0, True, prepared, Script(), "")
    await Choices([choice], Extras(), "r", load_tokenizer(None), generate).pump(full_once)
    assert len(taken) == MAX_WAITING + 2
