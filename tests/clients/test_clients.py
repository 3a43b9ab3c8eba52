"""litellm, LangChain and Anthropic's client against a real graph: what they make of our answers. `tox -e clients`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import litellm
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tests.drivers.served import MODEL, Served

# The clients' own warnings are theirs.
pytestmark = [pytest.mark.full, pytest.mark.infra, pytest.mark.filterwarnings("default")]

ASKED = "What is the weather in Rome?"


class Weather(BaseModel):
    """Says the weather of a city."""

    city: str = Field(description="Its name")
    days: int = Field(ge=1, le=7)


TOOL: Any = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}


@pytest.fixture(scope="session")
def llm(graph: Served) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{graph.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_langchain_binds_tools_and_ends_its_loop(llm: ChatOpenAI):
    bound = llm.bind_tools([Weather])
    called: Any = bound.invoke([HumanMessage(ASKED)])
    call = called.tool_calls[0]
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    ended = bound.invoke([HumanMessage(ASKED), called, ToolMessage("21", tool_call_id=call["id"])])
    assert ended.content
    assert not ended.tool_calls


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structures_its_output(llm: ChatOpenAI, method: Any):
    assert isinstance(llm.with_structured_output(Weather, method=method).invoke(ASKED), Weather)


def test_langchain_reads_logprobs(llm: ChatOpenAI):
    answer = llm.bind(logprobs=True, top_logprobs=3, max_tokens=5).invoke(ASKED)
    content = answer.response_metadata["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [3] * 5


def test_langchain_batches_and_streams(llm: ChatOpenAI):
    short = llm.bind(max_tokens=6)
    prompts = [f"Story {n}" for n in range(8)]
    together = [answer.content for answer in short.batch(prompts)]
    assert together == [short.invoke(prompt).content for prompt in prompts]
    assert "".join(str(chunk.content) for chunk in short.stream(prompts[0])) == together[0]


def test_langchain_speaks_the_responses_api(graph: Served):
    llm = ChatOpenAI(model=MODEL, base_url=f"{graph.url}/v1", api_key="none", use_responses_api=True, max_retries=0)
    called: Any = llm.bind_tools([Weather]).invoke(ASKED)
    Weather.model_validate(called.tool_calls[0]["args"])


def test_langchain_embeds(graph: Served):
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{graph.url}/v1", api_key="none", check_embedding_ctx_length=False, dimensions=8
    )
    assert [len(vector) for vector in embeddings.embed_documents(["a", "b"])] == [8, 8]


def test_litellm_has_a_schema_kept(graph: Served):
    answer: Any = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{graph.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": ASKED}],
        response_format=Weather,
    )
    Weather.model_validate_json(answer.choices[0].message.content)


def test_litellm_calls_tools(graph: Served):
    asked: Any = {
        "model": f"openai/{MODEL}",
        "api_base": f"{graph.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [TOOL],
        "tool_choice": "required",
    }
    whole: Any = litellm.completion(**asked)
    (call,) = whole.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    built: Any = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (streamed,) = built.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


def test_anthropics_client_knows_what_went_wrong(graph: Served):
    client = anthropic.Anthropic(base_url=graph.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": ASKED}]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", max_tokens=5, messages=messages)
    assert isinstance(unknown.value.body, dict)
    assert (unknown.value.body["type"], unknown.value.body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.BadRequestError):
        # By the body: 2.12 of the client has no parameter for it any more.
        client.messages.create(model=MODEL, max_tokens=5, messages=messages, extra_body={"temperature": 9})


def test_anthropics_client_calls_tools(graph: Served):
    client = anthropic.Anthropic(base_url=graph.url, api_key="none", max_retries=0)
    tool: Any = {"name": "Weather", "input_schema": Weather.model_json_schema()}
    asked: Any = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": ASKED}], "tools": [tool]}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    block: Any = whole.content[0]
    Weather.model_validate(block.input)
    with client.messages.stream(**asked) as stream:
        final: Any = stream.get_final_message()
    assert final.content[0].input == block.input


async def test_mixed_requests_at_once_are_those_of_each_alone(graph: Served):
    async with graph.client() as client:
        schema = Weather.model_json_schema()
        kinds: list[Any] = [
            {"tools": [TOOL], "tool_choice": "required"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}},
            {"logprobs": True, "top_logprobs": 4, "max_tokens": 8},
            {"n": 3, "max_tokens": 8, "seed": 5},
        ]

        async def ask(n: int) -> str:
            messages: Any = [{"role": "user", "content": f"Request {n // 4}"}]
            answer = await client.chat.completions.create(model=MODEL, messages=messages, **kinds[n % 4])
            for choice in answer.choices:
                for call in choice.message.tool_calls or ():
                    call.id = ""  # it is the request's own
            return json.dumps([choice.model_dump() for choice in answer.choices])

        alone = [await ask(n) for n in range(40)]
        assert await asyncio.gather(*(ask(n) for n in range(40))) == alone
