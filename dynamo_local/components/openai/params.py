"""Which of OpenAI's (and vLLM's) parameters we take, ignore, or refuse.

A parameter that would change the answer and that we do not implement is refused by name, unless its value is
the neutral one (`n: 1`, `logprobs: false`), which asks for what we do anyway. One that changes nothing a client
could see in the answer is accepted and ignored. Whatever is in neither table, nor in the request schema, is
unknown and refused: a misspelt `max_token` must not be silently dropped.

Source: https://platform.openai.com/docs/api-reference/chat/create and …/completions/create (read 2025), and
vLLM's `ChatCompletionRequest`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from dynamo_local.components.openai.errors import ApiError

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Bookkeeping and hints: the answer is the same without them."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "min_p": (0.0,),
    "n": (1,),
    "prompt_logprobs": (),
    "repetition_penalty": (1.0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
}

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = _BOTH | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Name -> the values that ask for nothing (null is always one of them)."""

UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = _BOTH | {
    "echo": (False,),
    "logprobs": (),  # 0 asks for the log probability of the chosen token
    "suffix": ("",),
}

NVEXT = ("ignore_eos", "min_tokens", "stop_token_ids", "top_k")
"""vLLM's sampling extras. Taken at the top level, or in Dynamo's `nvext` object (the top level wins)."""


def merge_nvext(body: dict[str, Any]) -> dict[str, Any]:
    """The body without `nvext`, its members moved to the top level. Raises `ApiError` for one we do not know."""
    nvext = body.get("nvext")
    if "nvext" not in body:
        return body
    merged = {name: value for name, value in body.items() if name != "nvext"}
    if nvext is None:
        return merged
    if not isinstance(nvext, dict):
        raise ApiError(400, f"`nvext` must be an object, not {_kind(nvext)}.", param="nvext", code="invalid_type")
    for name, value in nvext.items():
        if name not in NVEXT:
            message = f"`nvext.{name}` is not supported; `nvext` may hold {', '.join(NVEXT)}."
            raise ApiError(400, message, param=f"nvext.{name}", code="unsupported_parameter")
        if merged.get(name) is None:
            merged[name] = value
    return merged


def strip(body: Mapping[str, Any], known: Iterable[str], unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Only what the request schema knows and the client really set (null means "not set" throughout OpenAI's API).

    Raises `ApiError` 400 that names the first parameter that is unsupported or unknown.
    """
    known = frozenset(known)
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in unsupported:
            if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
                raise _unsupported(name, value, unsupported[name])
        elif name not in IGNORED:
            raise _unknown(name, known)
    return kept


def _same(value: Any, neutral: Any) -> bool:
    # In Python True == 1 and False == 0, but `logprobs: 0` is not `logprobs: false`.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _unsupported(name: str, value: Any, neutral: tuple[Any, ...]) -> ApiError:
    if name == "n":
        message = f"`n` must be 1: this server gives one choice per request (asked for {_short(value)})."
    else:
        allowed = "leave it out" + "".join(f" or send {_short(item)}" for item in neutral)
        message = f"The parameter `{name}` is not supported by this server; {allowed}."
    return ApiError(400, message, param=name, code="unsupported_parameter")


def _unknown(name: str, known: frozenset[str]) -> ApiError:
    near = difflib.get_close_matches(name, known | IGNORED, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    return ApiError(400, f"Unknown parameter: `{name}`{hint}", param=name, code="unknown_parameter")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)
