"""Tests what agents ask of `/v1/chat/completions`."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

MODEL = "sim-tiny"
HI: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Says it.", "parameters": parameters}}


TOOLS: Any = [tool("weather", CITY), tool("now", EMPTY)]
CALL = {"function": {"name": "f", "arguments": "{}"}}
DEEP: Any = {}
for _ in range(200):
    DEEP = {"items": DEEP}


class Person(BaseModel):
    """Shows what is to be parsed."""

    name: str
    age: int
    tags: list[str]


def call_of(answer: ChatCompletion) -> tuple[str, str, Any]:
    """(id, name, arguments) of the first call."""
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    return calls[0].id, calls[0].function.name, json.loads(calls[0].function.arguments)


async def test_an_agents_loop_ends(client: AsyncOpenAI):
    first = await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
    id_, name, arguments = call_of(first)
    assert first.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(arguments, {"weather": CITY, "now": EMPTY}[name])

    own: Any = first.choices[0].message.model_dump(exclude_none=True)
    results: Any = [{"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"} for call in own["tool_calls"]]
    last = await client.chat.completions.create(model=MODEL, messages=[*HI, own, *results], tools=TOOLS)
    assert id_.startswith("chatcmpl-tool-")
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


async def test_a_tool_can_be_demanded_named_or_forbidden(client: AsyncOpenAI):
    """`required`, a name, `none`; a named one ends with `stop`, as vLLM's."""
    after: Any = [*HI, {"role": "tool", "tool_call_id": "x", "content": "21"}]
    create = client.chat.completions.create
    required = await create(model=MODEL, messages=after, tools=TOOLS, tool_choice="required")
    assert required.choices[0].finish_reason == "tool_calls"
    named: Any = {"type": "function", "function": {"name": "now"}}
    one = await create(model=MODEL, messages=HI, tools=TOOLS, tool_choice=named)
    assert (call_of(one)[1:], one.choices[0].finish_reason) == (("now", {}), "stop")
    none = await create(model=MODEL, messages=HI, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content


async def test_streamed_calls_are_the_same(client: AsyncOpenAI):
    asked: Any = {"model": MODEL, "messages": HI, "tools": TOOLS, "tool_choice": "required", "seed": 5}
    whole = await client.chat.completions.create(**asked)
    found: dict[int, list[str]] = {}
    reason = None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                found[call.index] = [call.function.name or "", ""]
            found[call.index][1] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    calls: Any = whole.choices[0].message.tool_calls
    assert list(found.values()) == [[call.function.name, call.function.arguments] for call in calls]
    assert reason == "tool_calls"


async def test_an_answer_is_parsed(client: AsyncOpenAI):
    answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
        ({"structured_outputs": {"regex": "[a-f]{3}-\\d\\d"}}, lambda text: len(text) == 6),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, lambda text: "city" in json.loads(text)),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
async def test_an_answer_has_the_form_that_was_asked_for(client: AsyncOpenAI, asked: Any, fits: Any):
    more = {**asked, "ignore_eos": True, "min_tokens": 90}
    answer = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=200, extra_body=more)
    assert fits(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"


async def test_a_form_that_is_cut_ends_by_length(client: AsyncOpenAI):
    answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, max_tokens=5)
    assert (answer.choices[0].finish_reason, answer.usage and answer.usage.completion_tokens) == ("length", 5)


async def test_logprobs_are_numbers_that_agree(client: AsyncOpenAI):
    """One for each token, the likeliest first, in all no more than 1; the tokens make up the text."""
    asked: Any = {"model": MODEL, "messages": HI, "max_tokens": 12, "logprobs": True, "top_logprobs": 20}
    answer = await client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    assert len(content) == 12
    for one in content:
        values = [other.logprob for other in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert (len(values), values[0], one.top_logprobs[0].token) == (20, one.logprob, one.token)
        assert sum(map(math.exp, values)) <= 1
        assert bytes(one.bytes or ()).decode() == one.token
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or ()
    assert [one.logprob for one in streamed] == [one.logprob for one in content]


async def test_choices_are_counted_and_their_indices_are_right(client: AsyncOpenAI):
    asked: Any = {"model": MODEL, "messages": HI, "max_tokens": 9, "n": 3, "seed": 11}
    whole = await client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    one = await client.chat.completions.create(**{**asked, "n": 1, "seed": 13})
    assert one.choices[0].message.content == texts[2]  # the third choice has the seed of the request and two
    assert whole.usage is not None
    assert one.usage is not None
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens
    assert whole.usage.completion_tokens == sum([9, 9, 9])
    streamed = {0: "", 1: "", 2: ""}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = []
    async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=options):
        counts.append(chunk.usage and chunk.usage.completion_tokens)
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert counts[-1] == 27
    assert None not in counts


async def test_a_seed_is_respected(client: AsyncOpenAI):
    """The same again for the same one, something else for another; nothing is left to chance at temperature 0."""

    async def text(**asked: Any) -> str | None:
        answer = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=8, **asked)
        return answer.choices[0].message.content

    assert await text(seed=1) == await text(seed=1)
    assert await text(seed=1) != await text(seed=2)
    assert await text(seed=1, temperature=0) == await text(seed=2, temperature=0) == await text()


async def test_what_changes_nothing_here_is_taken(client: AsyncOpenAI):
    more = {
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "bad_words": ["x"],
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "structured_outputs": None,
        "top_logprobs": None,
    }
    content: Any = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    history: Any = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": None},
        *HI,
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=history, max_tokens=4, extra_body=more)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools"),
        ({"tools": [tool("f", {"not": {}})] * 2}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_p": 2}, "min_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"tools": [tool("f" * n, EMPTY) for n in (1, 129)]}, "tools[1].function.name"),
        ({"tools": [tool("f", {"description": "x" * 2**20})]}, "tools"),
        ({"response_format": {"type": "json_object", "x": "y" * 2**18}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}}, "response_format"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
         "response_format"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["<|im_end|>"]}}, "structured_outputs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(client: AsyncOpenAI, asked: Any, param: str):
    body = {"model": MODEL, "messages": HI, "max_tokens": 64, **asked}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/chat/completions", cast_to=ChatCompletion, body=body)
    assert caught.value.param == param
