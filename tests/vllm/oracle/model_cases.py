"""What is asked of models that generate nothing: vectors, classes, scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.vllm.oracle.requests import CHAT, GREEDY, MODEL, PROMPT, Case

TEXTS = ["a lease is a promise", "a drain ends it", "the planner waits"]
CONVERSATION = {"messages": CHAT}
BAD_BODIES: tuple[tuple[str, Any], ...] = (
    ("not JSON", b"{"),
    ("not an object", b"[1]"),
    ("an empty body", b""),
    ("an empty object", {}),
)


def numbered(cases: Iterator[Case]) -> list[Case]:
    """All of them."""
    return [replace(case, number=number) for number, case in enumerate(cases)]


def _both(path: str, parameter: str, body: Mapping[str, Any]) -> Iterator[Case]:
    yield Case(path, parameter, dict(body))
    yield Case(path, parameter, {**body, "stream": True})


def _bad(path: str) -> Iterator[Case]:
    for name, body in BAD_BODIES:
        yield Case(path, name, body)


def _refused_elsewhere() -> Iterator[Case]:
    """What this model cannot do."""
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
    """Of a model that embeds."""
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
    """Of a model that classifies."""
    yield from _texts("/classify")
    yield from _texts("/pooling")
    for task in ("classify", "token_classify", "embed", None):
        yield Case("/pooling", "task", {"model": MODEL, "input": TEXTS, "task": task})
    yield Case("/v1/embeddings", "input", {"model": MODEL, "input": TEXTS})
    yield Case("/score", "text_1, text_2", {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS})
    yield Case("/rerank", "query, documents", {"model": MODEL, "query": TEXTS[0], "documents": TEXTS})
    yield from _refused_elsewhere()
