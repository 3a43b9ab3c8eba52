"""Requests to models that do more than generate, or something else: adapters, reasoning, vectors, scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.vllm.oracle.requests import CHAT, GREEDY, LONG, MODEL, NAMED, PROMPT, SCHEMA, SEEDED, TOOL, Case

ADAPTER = "tiny-adapter"
PRIORITY = "X-Vllm-Priority"
PICTURE = "a picture"
MARKS = ("<think>", "</think>")
TEXTS = ["a lease is a promise", "a drain ends it", "the planner waits"]
CONVERSATION = {"messages": CHAT}
BAD_BODIES: tuple[tuple[str, Any], ...] = (
    ("not JSON", b"{"),
    ("not an object", b"[1]"),
    ("an empty body", b""),
    ("an empty object", {}),
)


def numbered(cases: Iterator[Case]) -> list[Case]:
    return [replace(case, number=number) for number, case in enumerate(cases)]


def _both(path: str, parameter: str, body: Mapping[str, Any]) -> Iterator[Case]:
    yield Case(path, parameter, dict(body))
    yield Case(path, parameter, {**body, "stream": True})


def of_adapters() -> Iterator[Case]:
    """An adapter goes by a model's name of its own, beside the model that it adapts."""
    chat, text = {"messages": CHAT, **GREEDY}, {"prompt": PROMPT, **GREEDY}
    for model in (ADAPTER, MODEL, "no-such-adapter"):
        for more in (
            {},
            {**SEEDED, "n": 2},
            {"logprobs": True, "top_logprobs": 2},
            {**LONG, "tools": [TOOL], "tool_choice": NAMED},
            {**LONG, "structured_outputs": {"json": SCHEMA}},
        ):
            yield from _both("/v1/chat/completions", "an adapter", {**chat, **more, "model": model})
        for more in ({}, {"logprobs": 2, "echo": True}, {"prompt_logprobs": 1}, {"prompt": TEXTS}):
            yield from _both("/v1/completions", "an adapter", {**text, **more, "model": model})
        answer = {"model": model, "input": "What is a lease?", "temperature": 0, "max_output_tokens": 8}
        yield from _both("/v1/responses", "an adapter", answer)
        message = {"model": model, "messages": CHAT[1:], "temperature": 0, "max_tokens": 8}
        yield from _both("/v1/messages", "an adapter", message)
        yield Case("/tokenize", "an adapter", {"model": model, "prompt": PROMPT})
    yield Case("/v1/models", "the list", None)


def of_reasoning(end: int) -> Iterator[Case]:
    """Answers whose reasoning ends somewhere, at once, or never: the token `end` is made likelier, or forbidden."""
    chat: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 1, "max_tokens": 32}
    for seed, bias in enumerate((-100, 3, 4, 5, 6, 7, 100)):
        likely = {**chat, "seed": seed, "logit_bias": {str(end): bias}}
        yield from _both("/v1/chat/completions", "reasoning", likely)
        yield from _both("/v1/chat/completions", "include_reasoning", {**likely, "include_reasoning": False})
    likely = {**chat, "seed": 8, "logit_bias": {str(end): 6}}
    for name, more in (
        ("n", {"n": 3}),
        ("logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("response_format", {"response_format": {"type": "json_object"}, "max_tokens": 64}),
        ("structured_outputs", {"structured_outputs": {"json": SCHEMA}, "max_tokens": 64}),
        ("structured_outputs", {"structured_outputs": {"choice": ["red", "green"]}, "max_tokens": 64}),
        ("tools", {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64}),
        ("tools", {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 64}),
        ("tools", {"tools": [TOOL], "tool_choice": "auto"}),
        *(("reasoning_effort", {"reasoning_effort": effort}) for effort in ("none", "low", "high", "huge", None)),
        ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("thinking_token_budget", {"thinking_token_budget": 4}),
        ("return_token_ids", {"return_token_ids": True}),
    ):
        yield from _both("/v1/chat/completions", name, {**likely, **more})
    # Not streamed: text is held back for the stop, its tokens are not, and what vLLM's parser makes of that depends on
    # which tokens came together.
    yield Case("/v1/chat/completions", "stop", {**likely, "stop": [MARKS[1]]})
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": "yes", name: "hm, a lease"}
        yield from _both("/v1/chat/completions", name, {**likely, "messages": [*CHAT, said, CHAT[1]]})
    yield from _both("/v1/completions", "reasoning", {"model": MODEL, "prompt": PROMPT, **SEEDED, "max_tokens": 24})
    yield from _reasoning_elsewhere()


def _reasoning_elsewhere() -> Iterator[Case]:
    """In the Responses API and in Anthropic's, which have names of their own for it."""
    answer = {"model": MODEL, "input": "What is a lease?", "temperature": 0, "max_output_tokens": 24}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm, a lease"}]}
    for more in (
        {},
        *({"reasoning": {"effort": effort}} for effort in ("low", "none", "huge")),
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"input": [CHAT[1], thought, {"role": "assistant", "content": "yes"}, CHAT[1]]},
        {"include": ["reasoning.encrypted_content"]},
    ):
        yield from _both("/v1/responses", next(iter(more), "plain"), {**answer, **more})
    message = {"model": MODEL, "messages": CHAT[1:], "temperature": 0, "max_tokens": 24}
    block = {"type": "thinking", "thinking": "hm, a lease", "signature": "x"}
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "yes"}]}
    for more in (
        {},
        *({"thinking": {"type": kind}} for kind in ("disabled", "adaptive", "deep")),
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048, "stop_sequences": ["e"]},
        {"output_config": {"effort": "low"}},
        {"messages": [CHAT[1], said, CHAT[1]]},
    ):
        yield from _both("/v1/messages", next(iter(more), "plain"), {**message, **more})


def of_priorities() -> Iterator[Case]:
    """Numbers that the engine's scheduler reads: of the body, or of a header, which wins."""
    answer = {"model": MODEL, "input": "What?", "temperature": 0, "max_output_tokens": 6}
    for priority in (0, 5, -3, "high", 1.5, None):
        asked = {"model": MODEL, **GREEDY, "priority": priority}
        yield from _both("/v1/chat/completions", "priority", {**asked, "messages": CHAT})
        yield from _both("/v1/completions", "priority", {**asked, "prompt": PROMPT})
        yield from _both("/v1/responses", "priority", {**answer, "priority": priority})
    asked = {"model": MODEL, **GREEDY, "messages": CHAT, "priority": 1}
    for given in ("7", "soon"):
        for case in _both("/v1/chat/completions", PRIORITY, asked):
            yield replace(case, headers={PRIORITY: given})


def of_pictures(pictures: Sequence[str]) -> Iterator[Case]:
    """Pictures as `data:` URLs: each more often than there are workers, and in every form that an API has for them."""
    path, asked = "/v1/chat/completions", {"model": MODEL, **GREEDY}
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    text = {"type": "text", "text": "What is this?"}

    def chat(*content: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {**asked, "messages": [{"role": "user", "content": list(content)}], **more}

    for _ in range(4):
        for part in parts:
            yield Case(path, PICTURE, chat(text, part))
    for name, body in (
        ("several pictures", chat(*parts[:2], text)),
        ("several pictures", chat(parts[0], parts[0], text)),
        ("several pictures", chat(*parts, text)),
        ("text and a picture in turns", chat(text, parts[0], text, parts[1])),
        ("no text", chat(parts[0])),
        ("n", chat(parts[0], text, **SEEDED, n=2)),
        ("logprobs", chat(parts[0], text, logprobs=True, top_logprobs=2)),
        ("structured_outputs", chat(parts[0], text, structured_outputs={"json": SCHEMA}, max_tokens=48)),
        ("tools", chat(parts[0], text, tools=[TOOL], tool_choice=NAMED, max_tokens=48)),
        ("detail", chat({"type": "image_url", "image_url": {"url": pictures[0], "detail": "low"}}, text)),
        ("uuid", chat({**parts[0], "uuid": "first"}, text)),
        ("uuid", chat({"type": "image_url", "image_url": None, "uuid": "first"}, text)),
        ("uuid", chat({"type": "image_url", "image_url": None, "uuid": "nobody's"}, text)),
        ("input_image", chat({"type": "input_image", "image_url": pictures[0]}, text)),
        ("not a picture", chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, text)),
        ("not a picture", chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, text)),
        ("not a picture", chat({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, text)),
        ("not a picture", chat({"type": "image_url", "image_url": {}}, text)),
        ("another medium", chat({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}, text)),
        ("no picture", chat(text)),
    ):
        yield from _both(path, name, body)
    answer = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    content = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": pictures[0]}]
    yield from _both("/v1/responses", PICTURE, {**answer, "input": [{"role": "user", "content": content}]})
    kind, _, data = pictures[0].removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    block = {"role": "user", "content": [{"type": "image", "source": source}, text]}
    yield from _both("/v1/messages", PICTURE, {"model": MODEL, "temperature": 0, "max_tokens": 8, "messages": [block]})
    yield from _both("/v1/completions", "no picture", {**asked, "prompt": PROMPT})
    yield Case("/tokenize", PICTURE, {"model": MODEL, "messages": [{"role": "user", "content": [text, parts[0]]}]})


def _bad(path: str) -> Iterator[Case]:
    for name, body in BAD_BODIES:
        yield Case(path, name, body)


def _refused_elsewhere() -> Iterator[Case]:
    asked, why = {"model": MODEL, **GREEDY}, "a model that does not generate"
    yield from _both("/v1/chat/completions", why, {**asked, **CONVERSATION})
    yield from _both("/v1/completions", why, {**asked, "prompt": PROMPT})
    yield Case("/tokenize", "prompt", {"model": MODEL, "prompt": PROMPT})
    yield Case("/detokenize", "tokens", {"model": MODEL, "tokens": [5, 6, 7]})


def _texts(path: str) -> Iterator[Case]:
    """One text, several, token ids, and what none can be."""
    for given in (
        PROMPT, TEXTS, [5, 6, 7], [[5, 6], [7, 8, 9]], "", [], [""], None, 7, [99999], "word " * 9000, [None],
    ):  # fmt: skip
        yield Case(path, "input", {"model": MODEL, "input": given})
    yield Case(path, "messages", {"model": MODEL, **CONVERSATION})
    yield Case(path, "messages", {"model": MODEL, **CONVERSATION, "add_generation_prompt": True})
    yield Case(path, "messages", {"model": MODEL, "messages": []})
    for name, values in {
        "truncate_prompt_tokens": [5, -1, -7],
        "add_special_tokens": [False, True],
        "user": ["somebody"],
        "priority": [1],
        "request_id": ["mine"],
        "cache_salt": ["grain", ""],
        "use_activation": [True, False],
        "no_such_parameter": [1],
    }.items():
        for value in values:
            yield Case(path, name, {"model": MODEL, "input": TEXTS, name: value})
    for model in ("nobody", None, 7):
        yield Case(path, "model", {"model": model, "input": PROMPT})
    yield from _bad(path)


def of_vectors() -> Iterator[Case]:
    path = "/v1/embeddings"
    yield from _texts(path)
    for name, values in {
        "encoding_format": ["float", "base64", "bytes", "bytes_only", "pictures", None],
        "embed_dtype": ["float16", "float32", "int3"],
        "dimensions": [8, 0, 100000, None],
    }.items():
        for value in values:
            yield Case(path, name, {"model": MODEL, "input": TEXTS, name: value})
    yield from _texts("/pooling")
    for task in ("embed", "token_embed", "classify", "nothing", None):
        yield Case("/pooling", "task", {"model": MODEL, "input": TEXTS, "task": task})
    for format_ in ("float", "base64"):
        yield Case("/pooling", "encoding_format", {"model": MODEL, "input": TEXTS, "encoding_format": format_})
    yield from of_scores()
    yield Case("/classify", "input", {"model": MODEL, "input": TEXTS})
    yield from _refused_elsewhere()


def of_scores() -> Iterator[Case]:
    """Pairs of texts: by their vectors, or by a model that reads both."""
    for path in ("/score", "/v1/score"):
        for pair in (
            {"text_1": TEXTS[0], "text_2": TEXTS[1]},
            {"text_1": TEXTS[0], "text_2": TEXTS},
            {"text_1": TEXTS, "text_2": TEXTS[::-1]},
            {"text_1": TEXTS[:2], "text_2": TEXTS},
            {"queries": TEXTS[0], "documents": TEXTS[1:]},
            {"queries": TEXTS, "documents": []},
            {"text_1": 7, "text_2": TEXTS},
            {"text_1": TEXTS[0], "text_2": TEXTS, "truncate_prompt_tokens": 4},
            {"text_1": "word " * 9000, "text_2": TEXTS},
        ):
            yield Case(path, ", ".join(sorted(pair)), {"model": MODEL, **pair})
        yield Case(path, "model", {"model": "nobody", "text_1": TEXTS[0], "text_2": TEXTS[1]})
        yield from _bad(path)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        for more in (
            {},
            {"top_n": 2},
            {"top_n": 0},
            {"top_n": -1},
            {"top_n": 50},
            {"documents": []},
            {"documents": TEXTS[0]},
            {"query": ""},
            {"query": None},
            {"truncate_prompt_tokens": 4},
            {"model": "nobody"},
        ):
            body = {"model": MODEL, "query": "What is a lease?", "documents": TEXTS, **more}
            yield Case(path, next(iter(more), "query, documents"), body)
        yield from _bad(path)


def of_classes() -> Iterator[Case]:
    yield from _texts("/classify")
    yield from _texts("/pooling")
    for task in ("classify", "token_classify", "embed", None):
        yield Case("/pooling", "task", {"model": MODEL, "input": TEXTS, "task": task})
    yield Case("/v1/embeddings", "input", {"model": MODEL, "input": TEXTS})
    yield Case("/score", "text_1, text_2", {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS})
    yield Case("/rerank", "query, documents", {"model": MODEL, "query": TEXTS[0], "documents": TEXTS})
    yield from _refused_elsewhere()
