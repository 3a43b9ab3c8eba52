"""Tests what is refused before any worker is asked, and the defaults of what is sent."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.components.messages import parse_text_request
from dynamo_local.components.text.prepare import Kind, Prepared, prepare
from dynamo_local.components.text.tokenizer import Tokenizer, load_tokenizer
from dynamo_local.errors import InvalidRequest

TINY = load_tokenizer(None)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "request_id": "r1"}
LENGTH = len(TINY.encode_chat(CHAT["messages"]))


def prepared(kind: Kind, body: dict[str, Any], max_model_len: int) -> Prepared:
    """As the Processor prepares what comes from a Frontend."""
    return prepare(kind, parse_text_request(body), TINY, max_model_len)


def test_chat_defaults_to_what_is_left_of_the_context() -> None:
    request = prepared("chat", CHAT, 100)
    assert request.request_id == "r1"
    assert request.sampling.max_tokens == 100 - LENGTH
    assert request.sampling.stop_token_ids == TINY.eos_token_ids
    assert (request.sampling.temperature, request.sampling.top_k, request.stop) == (1.0, -1, ())


def test_completion_defaults_to_16_tokens_or_less() -> None:
    ids = list(range(10))
    assert prepared("completion", {"prompt": ids}, 100).sampling.max_tokens == 16
    assert prepared("completion", {"prompt": ids}, 15).sampling.max_tokens == 5


def test_everything_asked_for_is_passed_on() -> None:
    body = {
        "prompt": [5, 6],
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 9,
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "stop": ["x", "y"],
        "stop_token_ids": [11, 2],
        "min_tokens": 2,
    }
    sampling = prepared("completion", body, 100).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0, 0.5, 9)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (3, 0.1, 0.2)
    assert (sampling.stop_token_ids, sampling.min_tokens) == ((11, 2, 0), 2)
    assert prepared("completion", body, 100).stop == ("x", "y")


def test_ignore_eos_keeps_only_the_clients_stop_ids() -> None:
    body = {"prompt": [5], "ignore_eos": True, "stop_token_ids": [77], "stop": "END"}
    request = prepared("completion", body, 100)
    assert (request.sampling.stop_token_ids, request.sampling.ignore_eos, request.stop) == ((77,), True, ("END",))


@pytest.mark.parametrize(
    ("kind", "body", "limit", "param"),
    [
        ("chat", CHAT, LENGTH, "messages"),
        ("completion", {"prompt": [1, 2, 3]}, 3, "prompt"),
        ("completion", {"prompt": [1, 2, 3], "max_tokens": 8}, 10, "max_tokens"),
        ("completion", {"prompt": [1], "max_tokens": 0}, 10, "max_tokens"),
        ("completion", {"prompt": [1], "max_tokens": "many"}, 10, "max_tokens"),
        ("completion", {"prompt": [1], "stop_token_ids": [1, "x"]}, 10, "stop_token_ids"),
        ("completion", {"prompt": None}, 10, "prompt"),
        ("chat", {"messages": None}, 10, "messages"),
        ("completion", {"prompt": [1], "stop": ["x" * 1025]}, 10, "stop"),
        ("completion", {"prompt": [1], "stop": "x" * 100_000}, 10, "stop"),
        ("completion", {"prompt": [1], "stop": ["x"] * 65}, 10, "stop"),
        ("completion", {"prompt": [1], "stop_token_ids": [1] * 1025}, 10, "stop_token_ids"),
        ("chat", {"messages": CHAT["messages"] * 16_385}, 10**6, "messages"),
        ("completion", {"prompt": [1] * 1_000_000}, 10, "prompt"),
        ("completion", {"prompt": [1], "request_id": "x" * 513}, 10, "request_id"),
        ("completion", {"prompt": [1], "model": "x" * 513}, 10, "model"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind: Any, body: dict[str, Any], limit: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(kind, body, limit)
    assert caught.value.details["param"] == param


@pytest.mark.parametrize(
    ("kind", "body"),
    [("completion", {"prompt": "a b " * 2**20}), ("chat", {"messages": [{"role": "user", "content": "a b " * 2**20}]})],
    ids=["completion", "chat"],
)
def test_a_text_that_is_far_too_long_is_refused_without_tokenising_it(kind: Kind, body: dict[str, Any]) -> None:
    counting = CountingTokenizer()
    with pytest.raises(InvalidRequest, match="more than 1000 tokens") as caught:
        prepare(kind, parse_text_request(body), counting, 1000)
    assert caught.value.details["code"] == "context_length_exceeded"
    assert counting.characters < 100_000


class CountingTokenizer(Tokenizer):
    """The built-in one, and how many characters it was asked to tokenise."""

    def __init__(self) -> None:
        self.__dict__.update(TINY.__dict__)
        self.characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_that_may_fit_is_tokenised_as_a_whole() -> None:
    text = " " * 100_000  # eight to a token
    assert len(prepared("completion", {"prompt": text}, 20_000).token_ids) == 12_500


def test_exactly_fitting_requests_are_taken() -> None:
    assert prepared("chat", CHAT, LENGTH + 1).sampling.max_tokens == 1
    assert prepared("completion", {"prompt": [1, 2, 3], "max_tokens": 7}, 10).sampling.max_tokens == 7
