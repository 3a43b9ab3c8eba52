"""Completions with several prompts and echo, the Responses API, Anthropic's Messages, tokens and embeddings."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from dynamo_local.components.openai.responses import ResponseHead
from dynamo_local.components.sim_api.other_apis import ResponsesFormat, parse_responses

MODEL = "sim-tiny"
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}


class Person(BaseModel):
    """Shows what is to be parsed."""

    name: str
    age: int


async def test_several_prompts_and_choices_of_each(client: AsyncOpenAI):
    answer = await client.completions.create(model=MODEL, prompt=["Hello", "Good bye"], n=2, max_tokens=4)
    alone = [await client.completions.create(model=MODEL, prompt=one, max_tokens=4) for one in ("Hello", "Good bye")]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [answer.choices[n].text for n in (0, 2)] == [one.choices[0].text for one in alone]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    ids = await client.completions.create(model=MODEL, prompt=[[42, 71], [84, 284]], max_tokens=4)
    assert len(ids.choices) == 2


async def test_echo_with_logprobs_scores_the_prompt(client: AsyncOpenAI):
    asked: Any = {"model": MODEL, "prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 3}
    answer = await client.completions.create(**asked)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith("Hello")
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert found.text_offset == [sum(map(len, found.tokens[:n])) for n in range(len(found.tokens))]
    offsets: list[int] = []
    async for chunk in await client.completions.create(**asked, stream=True):
        offsets += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.text_offset) or ()
    assert offsets == found.text_offset


async def test_responses_of_text_calls_and_forms(client: AsyncOpenAI):
    text = await client.responses.create(model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=5)
    assert (text.status, text.usage and text.usage.output_tokens) == ("incomplete", 5)
    assert text.output_text
    called = await client.responses.create(model=MODEL, input="Hi", tools=[TOOL])
    call: Any = called.output[0]
    assert (call.type, call.name, called.status) == ("function_call", "weather", "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"c": 21})}
    history: Any = [{"role": "user", "content": "Hi"}, call.model_dump(), result]
    ended = await client.responses.create(model=MODEL, input=history, tools=[TOOL])
    assert [item.type for item in ended.output] == ["message"]
    parsed = await client.responses.parse(model=MODEL, input="Hi", text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_streamed_responses_are_whole_at_their_end(client: AsyncOpenAI, tools: Any):
    events = [event async for event in await client.responses.create(model=MODEL, input="Hi", tools=tools, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))  # type: ignore[union-attr]
    last: Any = events[-1]
    item = last.response.output[0]
    assert deltas == (item.arguments if tools else item.content[0].text)


def test_a_response_that_is_complete_at_once_begins_without_its_usage():
    """A busy Frontend gets all of a short answer in one batch, before it writes the first event."""
    request = parse_responses(json.dumps({"model": MODEL, "input": "Hi", "stream": True}).encode())
    answer = ResponsesFormat(ResponseHead("1", MODEL, 0, include_usage=True), request)
    counts = {"prompt_tokens": 3, "prompt_tokens_details": None, "completion_tokens": 1, "total_tokens": 4}
    item = {"index": 0, "text": "x", "num_tokens": 1, "finish_reason": "stop", "usage": None}
    items = answer.note([item, {"usage": counts}])
    begun = answer.first() + answer.events(items)
    assert b'"usage":null' in begun
    assert b"input_tokens" not in begun
    assert b'"input_tokens":3' in answer.last()


async def test_what_responses_do_not_know_is_named(client: AsyncOpenAI):
    for asked, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}}, None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": MODEL, "input": "Hi", **asked})  # type: ignore[call-overload]
        assert param in (caught.value.param, None)


USER = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLAUDE_TOOL = {"name": "weather", "input_schema": CITY}


async def test_messages_of_anthropic(http: httpx.AsyncClient):
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "system": "Be brief.", "messages": [USER]}
    text = (await http.post("/v1/messages", json={**asked, "max_tokens": 4})).json()
    assert (text["type"], text["stop_reason"], text["usage"]["output_tokens"]) == ("message", "max_tokens", 4)
    called = (await http.post("/v1/messages", json={**asked, "tools": [CLAUDE_TOOL]})).json()
    block = called["content"][0]
    assert (block["type"], block["name"], called["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert isinstance(block["input"]["city"], str)
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "21"}]}
    history = [USER, {"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
    ended = (await http.post("/v1/messages", json={**asked, "messages": history, "tools": [CLAUDE_TOOL]})).json()
    assert ended["content"][0]["type"] == "text"
    wrong = await http.post("/v1/messages", json={**asked, "messages": [{"role": "user", "content": [{"type": "x"}]}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].content[0].type")


async def test_streamed_messages_of_anthropic(http: httpx.AsyncClient):
    asked = {"model": MODEL, "max_tokens": 100, "stream": True, "messages": [USER], "tools": [CLAUDE_TOOL]}
    lines = (await http.post("/v1/messages", json=asked)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "city" in json.loads("".join(pieces))
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_tokens_of_a_text_and_back(http: httpx.AsyncClient):
    """As vLLM's two endpoints; a chat is rendered first."""
    answer = (await http.post("/tokenize", json={"model": MODEL, "prompt": "Hello", "return_token_strs": True})).json()
    assert "".join(answer["token_strs"]) == "Hello"
    assert answer["count"] == len(answer["tokens"])
    back = await http.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})
    assert back.json() == {"prompt": "Hello"}
    chat = (await http.post("/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})).json()
    text = (await http.post("/detokenize", json={"model": MODEL, "tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    wrong = await http.post("/detokenize", json={"model": MODEL, "tokens": [10**6]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_embeddings_are_vectors_of_length_one(client: AsyncOpenAI):
    answer = await client.embeddings.create(model=MODEL, input=["a", "b", "a"], dimensions=24)
    vectors = [one.embedding for one in answer.data]
    assert [len(vector) for vector in vectors] == [24, 24, 24]
    assert vectors[0] == vectors[2] != vectors[1]
    assert math.isclose(sum(value * value for value in vectors[0]), 1, rel_tol=1e-5)
    plain = await client.embeddings.create(model=MODEL, input="a", encoding_format="float")
    assert len(plain.data[0].embedding) == 256
    assert answer.usage.prompt_tokens == 3
