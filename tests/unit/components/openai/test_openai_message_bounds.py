"""How many messages and text parts a conversation may have, and that a long one is read as a short one is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.components import limits
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.requests import ParsedRequest, parse_chat
from tests.tools.peak_memory import peak_bytes

MESSAGES = [{"role": "user", "content": "Hi"}]
PART = {"type": "text", "text": "a"}


def chat(messages: list[Any]) -> ParsedRequest:
    return parse_chat(body(messages))


def body(messages: list[Any]) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": messages})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (MESSAGES * 100_000, "messages"),
        ([*MESSAGES, {"role": "user", "content": [PART] * 100_000}], "messages[1].content"),
        ([*MESSAGES, {"role": "user", "content": [PART] * (limits.MAX_MESSAGES + 1)}], "messages[1].content"),
    ],
)
def test_too_many_messages_or_parts_are_not_made(messages: list[Any], param: str):
    sent = body(messages)

    def parse() -> None:
        with pytest.raises(ApiError) as caught:
            parse_chat(sent)
        assert (caught.value.status, caught.value.param) == (400, param)

    assert peak_bytes(parse) < 2 * len(sent) + 2**20


@given(messages=st.lists(st.sampled_from(["", "a", None, [], [PART], [PART, PART]]), min_size=1, max_size=20))
def test_a_long_conversation_is_read_as_a_short_one(messages: list[Any]):
    """One by one and all at once is the same, or the same refusal."""
    short = [{"role": "user", "content": content} for content in messages]
    long = [*short, {"role": "user", "content": "x" * (limits.LARGE_BYTES + 1)}]
    if None in messages:
        with pytest.raises(ApiError) as of_long:
            chat(long)
        with pytest.raises(ApiError) as of_short:
            chat(short)
        assert of_long.value.message == of_short.value.message
    else:
        assert chat(long).payload["messages"][:-1] == chat(short).payload["messages"]
