"""Requests to `vllm serve` and to a graph: parameters of every endpoint, good, bad and null; streamed and not.

Each answer is decided: greedy, or sampled from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MODEL = "tiny"
PROMPT = "The arbiter drains a worker before its lease"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lease of a worker?"}]
GREEDY: Mapping[str, Any] = {"temperature": 0, "max_tokens": 8}
SEEDED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 8}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "name": "r", "schema": SCHEMA}
LOGPROBS = ["message.output_text.logprobs"]
NAMED = {"type": "function", "function": {"name": "look_up"}}
CALLED = [
    *CHAT,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"ok": true}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a lease is a promise"},
]
LONG = {**GREEDY, "max_tokens": 48}


@dataclass(frozen=True)
class Case:
    """One request; without a body it is a GET. `parameter` is what it is about: a row of the table in docs/api.md."""

    path: str
    parameter: str
    body: Any
    number: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    differs: str | None = None
    """How, and why, a graph is meant to answer otherwise; None: it is not."""

    @property
    def stream(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    def __str__(self) -> str:
        return f"{self.path} {self.parameter} #{self.number}{' streamed' if self.stream else ''}"


SAMPLING: Mapping[str, list[Any]] = {
    "temperature": [0, 0.3, -1, 5, "warm", None],
    "top_p": [0.5, 1, 0, 1.5, None],
    "top_k": [5, -1, 0, -7, None],
    "min_p": [0.2, 2, None],
    "repetition_penalty": [1.3, -1, None],
    "presence_penalty": [1.5, 9, None],
    "frequency_penalty": [0.5, -9, None],
    "logit_bias": [{"40": 90}, {"40": 200}, {"99999": 1}, None],
    "stop": ["e", ["zzz", "a"], [], None],
    "stop_token_ids": [[40, 41, 42, 43], None],
    "include_stop_str_in_output": [True],
    "bad_words": [["the"], None],
    "min_tokens": [4, 400, -1],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "seed": [3, None, "x"],
    "n": [2, 3, 0, -1, None],
    "max_tokens": [1, 0, -3, 100000, None],
    "prompt_logprobs": [2, -5, None],
    "allowed_token_ids": [[40, 41, 42], [], [999999]],
    "priority": [1, 0, "high", None],
    "truncate_prompt_tokens": [5, -1],
    "structured_outputs": [
        {"json": SCHEMA},
        {"regex": "[ab]{3}c"},
        {"choice": ["red", "green"]},
        {"grammar": 'root ::= "x" | "yy"'},
        {"regex": "a", "choice": ["b"]},
        {"json": "{"},
        None,
    ],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema"},
        {"type": "yaml"},
        None,
    ],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, None],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "user": ["somebody"],
    "cache_salt": ["grain", ""],
    "kv_transfer_params": [None],
    "no_such_parameter": [1],
}
OF_CHAT: Mapping[str, list[Any]] = {
    "logprobs": [True, False, 3, None],
    "top_logprobs": [2, 100, -2],
    "max_completion_tokens": [5, 0, None],
    "tools": [[TOOL], [], None, "hammer"],
    "tool_choice": ["auto", "none", "required", NAMED, {"type": "function", "function": {"name": "other"}}, "maybe"],
    "parallel_tool_calls": [False, True],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "add_special_tokens": [True],
    "chat_template_kwargs": [{"enable_thinking": False}, None],
    "reasoning_effort": ["low", "none", "huge", None],
    "include_reasoning": [False],
    "documents": [[{"title": "a", "text": "b"}]],
    "echo": [True],
    "messages": [
        CALLED,
        [{"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]}],
        [{"role": "user", "content": "hi", "name": "ann"}],
        [{"role": "assistant", "content": "I think", "reasoning_content": "hm"}, {"role": "user", "content": "so?"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        [{"role": "wizard", "content": "hi"}],
        [{"content": "hi"}],
        [],
        "hi",
        None,
        [{"role": "user", "content": "word " * 9000}],
    ],
    "model": ["nobody", None, 7],
}
OF_COMPLETIONS: Mapping[str, list[Any]] = {
    "logprobs": [2, 0, 100, -3, None],
    "echo": [True],
    "prompt": [[5, 6, 7], ["one", "two"], [[5, 6], [7, 8]], "", [], None, 7, [99999], "word " * 9000],
    "suffix": ["end"],
    "best_of": [2],
    "add_special_tokens": [False],
    "model": ["nobody", None],
}
TOGETHER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tools", {**LONG, "tools": [TOOL], "tool_choice": "required"}),
    ("tools", {**LONG, "tools": [TOOL], "tool_choice": NAMED, "logprobs": True}),
    ("tools", {**LONG, "tools": [TOOL], "tool_choice": "required", "n": 2}),
    ("tools", {**LONG, "tools": [TOOL], "tool_choice": "auto", "messages": CALLED}),
    ("response_format", {**LONG, "response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2}),
    ("structured_outputs", {**LONG, "structured_outputs": {"json": SCHEMA}, "n": 2, "seed": 5, "temperature": 1}),
    ("logprobs", {**GREEDY, "logprobs": True, "top_logprobs": 3, "n": 2, "seed": 5, "temperature": 1}),
    ("logprobs", {**GREEDY, "logprobs": True, "top_logprobs": 0}),
    ("stop", {**GREEDY, "stop": ["e"], "logprobs": True, "include_stop_str_in_output": True}),
    ("stop", {**GREEDY, "stop": ["e"], "min_tokens": 6}),
)
COMPLETIONS_TOGETHER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("echo", {**GREEDY, "echo": True, "logprobs": 2}),
    ("echo", {**GREEDY, "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("echo", {**GREEDY, "echo": True, "n": 2, "seed": 4, "temperature": 1}),
    ("n", {**SEEDED, "n": 3, "prompt": ["one", "two"], "logprobs": 1}),
    ("prompt", {**GREEDY, "prompt": ["one", "two"], "stream_options": {"include_usage": True}}),
    ("stop", {**GREEDY, "stop": ["e", "a"], "logprobs": 1}),
)


def cases() -> list[Case]:
    found = [*_chat(), *_completions(), *_others(), *_meant_to_differ()]
    return [replace(case, number=number) for number, case in enumerate(found)]


def _swept(path: str, base: Mapping[str, Any], values: Mapping[str, list[Any]]) -> Iterator[Case]:
    for name, given in values.items():
        usual = {**base, **(SEEDED if name in ("temperature", "top_p", "top_k", "min_p", "n", "seed") else GREEDY)}
        for value in given:
            body = {**usual, name: value}
            if name == "seed" and value is None:
                body["temperature"] = 0
            if name == "tool_choice":
                body |= {"tools": [TOOL], "max_tokens": 48}
            if name in ("top_logprobs",):
                body["logprobs"] = True
            if name == "include_stop_str_in_output":
                body["stop"] = ["e"]
            if name == "continue_final_message":
                body |= {"add_generation_prompt": False}
            if name in ("structured_outputs", "response_format"):
                body["max_tokens"] = 48
            if name == "max_completion_tokens":
                del body["max_tokens"]
            if name == "max_tokens" and value is None:
                body["stop"] = ["e"]
            yield Case(path, name, body)
            yield Case(path, name, {**body, "stream": True})


def _chat() -> Iterator[Case]:
    path, base = "/v1/chat/completions", {"model": MODEL, "messages": CHAT}
    yield from _swept(path, base, SAMPLING)
    yield from _swept(path, base, OF_CHAT)
    for name, more in TOGETHER:
        yield Case(path, name, {**base, **more})
        yield Case(path, name, {**base, **more, "stream": True, "stream_options": {"include_usage": True}})


def _completions() -> Iterator[Case]:
    path, base = "/v1/completions", {"model": MODEL, "prompt": PROMPT}
    yield from _swept(path, base, SAMPLING)
    yield from _swept(path, base, OF_COMPLETIONS)
    for name, more in COMPLETIONS_TOGETHER:
        yield Case(path, name, {**base, **more})
        yield Case(path, name, {**base, **more, "stream": True, "stream_options": {"include_usage": True}})


def _others() -> Iterator[Case]:
    responses = {"model": MODEL, "input": "What is a lease?", "temperature": 0, "max_output_tokens": 8}
    for more in (
        {},
        {"instructions": "Be brief."},
        {"input": CHAT},
        {"text": {"format": FORMAT}, "max_output_tokens": 48},
        {"top_p": 0.5},
        {"temperature": -1},
        {"model": "nobody"},
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "function", "name": "look_up", "parameters": SCHEMA}], "tool_choice": "required",
         "max_output_tokens": 48},
        {"background": True},
        {"include": LOGPROBS, "top_logprobs": 2, "text": {"format": FORMAT}, "max_output_tokens": 48},
        {"input": None},
    ):  # fmt: skip
        name = next(iter(more), "plain")
        yield Case("/v1/responses", name, {**responses, **more})
        yield Case("/v1/responses", name, {**responses, **more, "stream": True})
    # Not streamed: the log-probabilities of half a character are in a stream only if its other half comes with it.
    yield Case("/v1/responses", "include", {**responses, "include": LOGPROBS, "top_logprobs": 2})
    anthropic = {"model": MODEL, "messages": [{"role": "user", "content": "What?"}], "max_tokens": 8, "temperature": 0}
    tool = {"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}
    for more in (
        {},
        {"system": "Be brief."},
        {"stop_sequences": ["e"]},
        {"top_k": 3},
        {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 48},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "look_up"}, "max_tokens": 48},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"max_tokens": None},
        {"model": "nobody"},
        {"messages": []},
        {"temperature": -1},
    ):
        name = next(iter(more), "plain")
        yield Case("/v1/messages", name, {**anthropic, **more})
        yield Case("/v1/messages", name, {**anthropic, **more, "stream": True})
    yield Case("/v1/messages/count_tokens", "plain", {"model": MODEL, "messages": CHAT[1:]})
    yield from _without_answers()


def _without_answers() -> Iterator[Case]:
    for body in (
        {"model": MODEL, "prompt": PROMPT},
        {"model": MODEL, "messages": CHAT},
        {"model": MODEL, "prompt": PROMPT, "return_token_strs": True, "add_special_tokens": False},
        {"model": "nobody", "prompt": PROMPT},
        {"model": MODEL},
    ):
        yield Case("/tokenize", ", ".join(sorted(body)), body)
    for body in ({"model": MODEL, "tokens": [5, 6, 7]}, {"model": MODEL, "tokens": "x"}, {"model": MODEL}):
        yield Case("/detokenize", ", ".join(sorted(body)), body)
    yield Case("/v1/models", "the list", None)
    yield Case("/v1/embeddings", "a model that generates", {"model": MODEL, "input": "text"})
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"):
        yield Case(path, "not JSON", b"{")
        yield Case(path, "not an object", b"[1]")
        yield Case(path, "an empty body", b"")
        yield Case(path, "an empty object", {})


def _meant_to_differ() -> Iterator[Case]:
    for path, prompt in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": PROMPT})):
        body = {"model": MODEL, **prompt, **GREEDY}
        why = "refused with a 400: a graph hands KV over by itself, and a client must not name another host for it"
        yield Case(path, "kv_transfer_params", {**body, "kv_transfer_params": {"do_remote_decode": False}}, differs=why)
        why = "a 415, not a 400: a page in somebody's browser could send it without asking"
        yield Case(path, "a Content-Type that is not JSON", body, headers={"content-type": "text/plain"}, differs=why)


def encoded(case: Case) -> bytes:
    return case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
