"""The two steps of a hand-over, as values: what the prefill server is sent, and what the decode server is."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.routing import disagg as kv_handover

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 50, "temperature": 0.5}


def test_a_prefill_is_one_token_unstreamed_for_a_remote_decode() -> None:
    request = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 9}
    asked = kv_handover.prefill_request(request)
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["min_tokens"]) == (1, 1, 1)
    assert asked["stream"] is False
    assert "stream_options" not in asked
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert asked["kv_transfer_params"]["do_remote_prefill"] is False
    assert (asked["messages"], asked["temperature"]) == (CHAT["messages"], 0.5)


def test_what_the_client_did_not_say_is_not_said_to_the_prefill_server() -> None:
    asked = kv_handover.prefill_request({"model": "m", "prompt": "Hi"})
    assert set(asked) == {"model", "prompt", "max_tokens", "stream", "kv_transfer_params"}


def test_the_decode_server_gets_the_clients_request_and_the_params_unchanged() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [3, 4], "remote_host": "127.0.0.1"}
    asked = kv_handover.decode_request(CHAT, params)
    assert asked == {**CHAT, "kv_transfer_params": params}
    assert "kv_transfer_params" not in CHAT


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        ({"id": "x", "kv_transfer_params": {"remote_block_ids": [1]}}, {"remote_block_ids": [1]}),
        ({"id": "x", "kv_transfer_params": None}, None),
        ({"id": "x", "kv_transfer_params": {}}, None),
        ({"id": "x"}, None),
        (["no", "object"], None),
    ],
)
def test_params_are_taken_from_the_prefill_servers_answer(answer: Any, params: Any) -> None:
    assert kv_handover.params_of(answer) == params


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2}, "n=2"),
        ({"best_of": 3}, "best_of=3"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2], [3]]}, "several prompts"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "of its own"),
    ],
)
def test_a_request_of_several_answers_is_not_handed_over(more: dict[str, Any], why: str) -> None:
    assert why in str(kv_handover.why_not({"model": "m", **more}))


@pytest.mark.parametrize("more", [{"n": 1}, {"prompt": [1, 2, 3]}, {"prompt": ["one"]}, {"n": None}])
def test_one_prompt_and_one_answer_are_handed_over(more: dict[str, Any]) -> None:
    assert kv_handover.why_not({"model": "m", **more}) is None
