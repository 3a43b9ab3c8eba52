"""The events that are put together by hand are the JSON that OpenAI documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.responses import ChatFormat, CompletionFormat, ResponseHead, error_event
from tests.fakes.data_plane.processor import usage

AWKWARD = ['"quoted"', "back\\slash", "new\nline\r\n\n", "emoji 😀", "null\x00", "\u2028", "data: [DONE]", "é"]


def head(include_usage: bool = False) -> ResponseHead:
    """A head with a model name that needs escaping."""
    return ResponseHead("abc", 'org/"m"', 1700000000, include_usage)


def events(raw: bytes) -> list[Any]:
    """The decoded `data:` of each event; `[DONE]` as the string it is."""
    assert raw == b"" or raw.endswith(b"\n\n")
    found = []
    for block in raw.split(b"\n\n")[:-1]:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        data = block.removeprefix(b"data: ")
        found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def test_a_chat_stream_is_made_of_chunks():
    shape = ChatFormat(head())
    base = {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": 'org/"m"',
        "system_fingerprint": None,
    }

    def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        return {**base, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

    assert events(shape.first()) == [chunk({"role": "assistant", "content": ""})]
    assert events(shape.texts(AWKWARD)) == [chunk({"content": text}) for text in AWKWARD]
    assert events(shape.last("stop", usage())) == [chunk({}, "stop"), "[DONE]"]


def test_a_completion_stream_is_made_of_chunks():
    shape = CompletionFormat(head())
    base = {
        "id": "cmpl-abc",
        "object": "text_completion",
        "created": 1700000000,
        "model": 'org/"m"',
        "system_fingerprint": None,
    }

    def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
        return {**base, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}

    assert shape.first() == b""
    assert events(shape.texts(AWKWARD)) == [chunk(text) for text in AWKWARD]
    assert events(shape.last("length", None)) == [chunk("", "length"), "[DONE]"]


@pytest.mark.parametrize("shape", [ChatFormat, CompletionFormat])
def test_usage_comes_in_a_chunk_of_its_own(shape: Any):
    made = shape(head(include_usage=True))
    reason, counted, done = events(made.last("stop", usage(5, 2)))
    assert reason["usage"] is None
    assert (counted["choices"], counted["usage"]) == ([], usage(5, 2))
    assert done == "[DONE]"
    assert [event["usage"] for event in events(made.first() + made.texts(["a", "b"]))] in ([None] * 3, [None] * 2)


def test_whole_answers():
    whole = json.loads(ChatFormat(head()).whole("Hi", "stop", usage()))
    assert whole["object"] == "chat.completion"
    assert whole["usage"] == usage()
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    whole = json.loads(CompletionFormat(head()).whole("Hi", "length", None))
    assert (whole["object"], whole["id"], whole["usage"]) == ("text_completion", "cmpl-abc", None)
    assert whole["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}]


def test_an_error_event_holds_the_error_object():
    assert events(error_event(ApiError(502, "lost", type="server_error", code="worker_lost"))) == [
        {"error": {"message": "lost", "type": "server_error", "param": None, "code": "worker_lost"}}
    ]
