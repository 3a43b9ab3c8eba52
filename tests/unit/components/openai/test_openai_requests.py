"""Tests what a request may hold, what the Processor gets of it, and how each refusal names its parameter."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_local.components import limits
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.requests import ParsedRequest, parse_chat, parse_completion
from tests.tools.peak_memory import peak_bytes

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**members: Any) -> ParsedRequest:
    """Parse a chat request with these members beside a model and a message."""
    return parse_chat(msgspec.json.encode({"model": "m", "messages": MESSAGES, **members}))


def completion(**members: Any) -> ParsedRequest:
    """Parse a completion request with these members beside a model and a prompt."""
    return parse_completion(msgspec.json.encode({"model": "m", "prompt": "Hi", **members}))


def refusal(call: Any, **members: Any) -> ApiError:
    """The 400 that the call is refused with."""
    with pytest.raises(ApiError) as caught:
        call(**members)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_a_plain_chat_request_passes_on_only_what_was_set():
    request = chat()
    assert request == ParsedRequest(model="m", stream=False, include_usage=False, payload=request.payload)
    assert request.payload == {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_all_supported_parameters_reach_the_processor():
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": -3,
        "presence_penalty": 1.0,
        "frequency_penalty": -2.0,
        "ignore_eos": True,
        "min_tokens": 2,
        "top_k": 5,
        "stop_token_ids": [1, 2],
        "max_tokens": 9,
    }
    assert chat(**sampling, stop="END").payload == {
        "model": "m",
        "messages": MESSAGES,
        "stop": ["END"],
        **sampling,
    }
    assert completion(**sampling, stop=["a", "b", "c", "d"]).payload == {
        "model": "m",
        "prompt": "Hi",
        "stop": ["a", "b", "c", "d"],
        **sampling,
    }


def test_zero_and_false_are_passed_on_as_set():
    payload = chat(temperature=0, seed=0, ignore_eos=False, min_tokens=0, max_tokens=5).payload
    assert (payload["temperature"], payload["seed"], payload["ignore_eos"], payload["min_tokens"]) == (0, 0, False, 0)


@pytest.mark.parametrize(("both", "expected"), [({"max_completion_tokens": 4}, 4), ({"max_tokens": 3}, 3)])
def test_either_name_of_the_token_limit_is_merged_into_max_tokens(both: dict[str, int], expected: int):
    payload = chat(**both).payload
    assert payload["max_tokens"] == expected
    assert "max_completion_tokens" not in payload


def test_the_newer_name_of_the_token_limit_wins():
    """As with OpenAI and vLLM."""
    assert chat(max_tokens=3, max_completion_tokens=4).payload["max_tokens"] == 4


def test_a_limit_that_was_not_set_is_not_invented():
    assert "max_tokens" not in completion().payload
    assert "max_tokens" not in chat().payload


def test_null_means_not_set():
    names = ["temperature", "stop", "max_tokens", "tools", "n", "logprobs", "response_format", "stream_options", "user"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_parameters_that_change_nothing_are_accepted():
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"}
    assert chat(**ignored) == chat()
    assert completion(**ignored) == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("logit_bias", {}),
        ("modalities", ["text"]),
        ("top_logprobs", 0),
        ("repetition_penalty", 1),
    ],
)
def test_an_unsupported_parameter_is_fine_when_it_asks_for_nothing(name: str, value: Any):
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("best_of", 2),
        ("guided_json", {}),
        ("chat_template", "x"),
    ],
)
def test_an_unsupported_chat_parameter_is_refused_by_name(name: str, value: Any):
    """Dropping it silently would give an answer to another question."""
    error = refusal(chat, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert f"`{name}`" in error.message


@pytest.mark.parametrize(
    ("name", "value"), [("suffix", "x"), ("best_of", 3), ("prompt_logprobs", 0), ("use_beam_search", True)]
)
def test_an_unsupported_completion_parameter_is_refused_by_name(name: str, value: Any):
    error = refusal(completion, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_an_unknown_parameter_is_refused_with_the_nearest_name():
    error = refusal(chat, max_token=5)
    assert (error.param, error.code) == ("max_token", "unknown_parameter")
    assert "did you mean `max_tokens`?" in error.message
    assert refusal(completion, messages=[]).param == "messages"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("model", 3),
        ("model", ""),
        ("stream", "yes"),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_completion_tokens", 0),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("seed", 1.5),
        ("seed", 2**63),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("stop", 5),
        ("stop", [f"stop {n}" for n in range(65)]),
        ("stop", "x" * 100_000),
        ("stop", ["x" * 1024] * 10_000),
        ("stop", ""),
        ("stop_token_ids", "x"),
        ("stop_token_ids", list(range(1025))),
        ("stop_token_ids", [1] * 100_000),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("top_k", -2),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", MESSAGES * (limits.MAX_MESSAGES + 1)),
        ("model", "m" * 513),
        ("model", "m" * 100_000),
        ("stream_options", True),
    ],
)
def test_a_wrong_type_or_value_names_its_parameter(param: str, value: Any):
    error = refusal(chat, **{param: value})
    assert error.param == param
    assert f"`{param}`" in error.message
    assert error.code in ("invalid_type", "invalid_value")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([*MESSAGES, {"role": "user"}], "messages[1].content"),
        ([*MESSAGES, {"role": "user", "content": "x", "colour": 1}], "messages[1].colour"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "audio", "text": "x"}]}], "messages[0].content[0].type"),
    ],
)
@pytest.mark.parametrize("length", [2, 2 * limits.LARGE_BYTES])
def test_a_bad_message_is_named_by_its_place(messages: list[Any], param: str, length: int):
    error = refusal(chat, messages=[*messages, {"role": "user", "content": "x" * length}])
    assert error.param == param
    assert f"`{param}`" in error.message


@pytest.mark.parametrize(
    "members",
    [
        {"x" * 100_000: 1},
        {"nvext": {"x" * 100_000: 1}},
        {"n": [1] * 10_000},
        {"messages": [{"role": "r" * 100_000}]},
        {"messages": [{"role": "user", "content": "", "x" * 100_000: 1}]},
        {"tools": [{}] * 10_000},
    ],
)
def test_an_error_repeats_no_long_word_of_the_clients(members: dict[str, Any]):
    error = refusal(chat, **members)
    assert len(error.body()) < 1500


def test_a_number_out_of_range_is_named():
    for number in (b"1e999", b"9" * 1000, b"-" + b"9" * 60_000, b"0." + b"0" * 60_000):
        with pytest.raises(ApiError) as caught:
            parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "seed": ' + number + b"}")
        assert (caught.value.status, caught.value.param) == (400, "seed")


def test_what_is_ignored_is_not_even_read():
    """Half a million empty lists cost a hundred megabytes once they are Python's."""
    many = [[]] * 500_000

    def ask() -> None:
        assert chat(metadata={"a": many}, user=many, messages=[{**MESSAGES[0], "annotations": many}]) == chat()

    assert peak_bytes(ask) < 16 * 2**20


def test_a_stop_string_that_is_too_long_is_named_by_its_place():
    error = refusal(chat, stop=["x" * 1024, "x" * 1025])
    assert (error.param, error.code) == ("stop[1]", "invalid_value")


def test_what_a_role_or_part_may_be_is_told():
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert "allowed: text" in refusal(chat, messages=[{"role": "user", "content": image}]).message
    assert "allowed: system, developer, user" in refusal(chat, messages=[{"role": "robot", "content": ""}]).message


def test_a_missing_parameter_is_named():
    for parse, body, param in (
        (parse_chat, {"model": "m"}, "messages"),
        (parse_chat, {"messages": MESSAGES}, "model"),
        (parse_completion, {"model": "m"}, "prompt"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(msgspec.json.encode(body))
        assert (caught.value.param, caught.value.code) == (param, "missing_required_parameter")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes):
    """Also what would overflow a recursive parser."""
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_an_assistants_own_message_can_be_sent_back():
    own = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    payload = chat(messages=[*MESSAGES, {**own, "function_call": None}]).payload
    assert payload["messages"][1] == {"role": "assistant", "content": "x"}


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    payload = chat(messages=[{"role": "user", "content": parts, "name": "Ann"}]).payload
    assert payload["messages"] == [{"role": "user", "content": "a\nb", "name": "Ann"}]


@pytest.mark.parametrize(
    ("prompt", "expected"), [("Hi", "Hi"), (["Hi"], "Hi"), ([1, 2, 3], [1, 2, 3]), ([[1, 2, 3]], [1, 2, 3])]
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, expected: Any):
    assert completion(prompt=prompt).payload["prompt"] == expected


def test_a_prompt_of_too_many_ids_is_refused_before_it_is_read():
    for prompt in ([1] * (2**20 + 1), [[1] * (2**20 + 1)], [[]] * (2**20 + 1)):
        error = refusal(completion, prompt=prompt)
        assert (error.param, error.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [1, "a"], ["a", 1], ["a"] * 129, [1.5], [-1], None])
def test_any_other_prompt_is_refused(prompt: Any):
    assert (refusal(completion, prompt=prompt).param or "").startswith("prompt")


def test_vllms_extras_are_taken_from_nvext_too():
    """Dynamo's place for them; the top level wins."""
    payload = chat(nvext={"ignore_eos": True, "top_k": 3, "min_tokens": 1, "stop_token_ids": [4]}, top_k=7).payload
    assert payload["ignore_eos"] is True
    assert (payload["top_k"], payload["min_tokens"], payload["stop_token_ids"]) == (7, 1, [4])
    assert chat(nvext=None) == chat()


def test_what_nvext_may_not_hold_is_named():
    assert refusal(chat, nvext={"annotations": ["x"]}).param == "nvext.annotations"
    assert refusal(chat, nvext=[1]).param == "nvext"
    assert refusal(chat, nvext={"top_k": "x"}).param == "top_k"


def test_more_tokens_wanted_than_allowed_is_refused():
    assert refusal(chat, min_tokens=5, max_tokens=4).param == "min_tokens"


def test_usage_in_a_stream_is_on_demand():
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert not chat(stream=True).include_usage
    assert refusal(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(chat, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert refusal(chat, stream=True, stream_options={"x": 1}).param == "stream_options.x"
