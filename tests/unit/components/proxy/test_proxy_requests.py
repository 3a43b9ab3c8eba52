"""Tests what the proxying Frontend reads of a request, and what goes on with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.proxy import app as requests
from dynamo_local.components.proxy.app import PATHS, parse, pick_headers

CHAT = PATHS[0]


def body(**members: Any) -> bytes:
    """A request with whatever else a server may understand."""
    return json.dumps({"model": "m", "guided_json": {"type": "object"}, "unheard": [1], **members}).encode()


def test_the_body_goes_on_as_it_came() -> None:
    raw = b'{"model" : "m",  "messages":[{"role":"user","content":"\\u00e9"}] , "own":1}'
    request = parse(raw, [])
    assert request.ask(CHAT, "r1").body == raw
    assert (request.model, request.stream, request.tokens) == ("m", False, None)


@pytest.mark.parametrize(
    ("members", "stream", "tokens"),
    [
        ({"stream": True, "max_tokens": 9}, True, 9),
        ({"stream": None, "max_completion_tokens": 7, "max_tokens": 9}, False, 7),
        ({"stream": "yes", "max_tokens": "many"}, False, None),
        ({"max_tokens": -1}, False, None),
    ],
)
def test_what_is_wrong_with_other_members_is_the_servers_to_say(
    members: dict[str, Any], stream: bool, tokens: int | None
) -> None:
    request = parse(body(**members), [])
    assert (request.stream, request.tokens) == (stream, tokens)


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"{}", "missing_required_parameter", "model"),
        (b'{"model": 3}', "invalid_type", "model"),
        (b'{"model": ""}', "invalid_type", "model"),
    ],
)
def test_without_a_model_nobody_can_be_asked(raw: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse(raw, [])
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


def test_of_the_clients_headers_only_those_for_the_server_go_on() -> None:
    given = [
        (b"Authorization", b"Bearer k"),
        (b"Host", b"front"),
        (b"X-Request-Id", b"theirs"),
        (b"traceparent", b"00-1"),
        (b"x-data-parallel-rank", b"3"),
    ]
    ask = parse(body(), given).ask(CHAT, "r1")
    assert ask.headers == {
        "authorization": "Bearer k",
        "traceparent": "00-1",
        "content-type": "application/json",
        "x-request-id": "r1",
    }


def test_headers_are_picked_whatever_their_case() -> None:
    assert pick_headers([("Content-Type", "a"), ("Server", "b")], ("content-type",)) == {"content-type": "a"}


def test_the_decode_body_has_the_params_of_the_prefill_servers_answer() -> None:
    request = parse(body(stream=True), [])
    prefill = requests.prefill_body(request)
    assert isinstance(prefill, bytes)
    assert json.loads(prefill)["guided_json"] == {"type": "object"}
    made = requests.decode_body(request, b'{"kv_transfer_params": {"remote_block_ids": [1]}}')
    assert isinstance(made, bytes)
    assert json.loads(made) == {**json.loads(request.body), "kv_transfer_params": {"remote_block_ids": [1]}}


@pytest.mark.parametrize(
    ("prompt", "handed_over"),
    [
        ("x" * 5000, True),
        (["x" * 5000], True),
        ([1] * 5000, True),
        ([[1] * 5000], True),
        (["x"] * 5000, False),
        ([[1]] * 5000, False),
    ],
    ids=["text", "batch of one text", "ids", "batch of one list", "texts", "lists"],
)
def test_a_long_prompt_is_judged_as_a_short_one(prompt: Any, handed_over: bool) -> None:
    request = parse(json.dumps({"model": "m", "prompt": prompt, "metadata": [[]] * 1000}).encode(), [])
    made = requests.prefill_body(request)
    if handed_over:
        assert {**json.loads(made), "kv_transfer_params": None} == {
            **json.loads(request.body), "stream": False, "max_tokens": 1, "kv_transfer_params": None,
        }  # fmt: skip
    else:
        assert made == "it has several prompts: a hand-over is for one"


def test_a_body_that_cannot_be_read_is_not_handed_over() -> None:
    assert "cannot be read" in str(requests.prefill_body(parse(b'{"model": "m", "seed": 1e999}', [])))


@pytest.mark.parametrize(("answer", "why"), [(b"<html>", "no JSON"), (b"{}", "no kv_transfer_params")])
def test_an_answer_without_params_says_why_there_is_no_hand_over(answer: bytes, why: str) -> None:
    assert why in str(requests.decode_body(parse(body(), []), answer))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error": {"message": "KV"}}\n\n', True),
        (b'data: {"error":{"message":"KV"}}\n\n', True),
        (b'data: {"object": "error", "message": "KV"}\n\n', True),
        (b'data: {"id":"x"}\n\ndata: {"error":{}}\n\n', True),
        (b'data: {"id":"x","choices":[{"delta":{"content":"{\\"error\\": 1}"}}]}\n\n', False),
        (b"data: [DONE]\n\n", False),
    ],
)
def test_an_error_among_events_is_known_from_an_answer(data: bytes, error: bool) -> None:
    assert requests.has_error_event(data) is error


@pytest.mark.parametrize(
    ("data", "nothing"),
    [
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', True),
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "index": 0}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n', True),
        (b'data: {"choices":[{"del', True),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":"a"}}]}\n\n', False),
        (b'data: {"choices":[{"text":"a"}]}\n\n', False),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\ndata: {}\n\n', False),
    ],
)
def test_a_chats_first_event_says_nothing_yet(data: bytes, nothing: bool) -> None:
    assert requests.says_nothing(data) is nothing
