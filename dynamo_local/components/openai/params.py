"""Which of OpenAI's (and vLLM's) parameters we take, ignore, or refuse.

A parameter that would change the answer and that we do not implement is refused by name, unless its value is
the neutral one (`best_of: 1`, `suffix: ""`), which asks for what we do anyway. One that changes nothing a client
could see in the answer is accepted and ignored. A parameter that is in neither table and not in the request schema is
unknown and refused: a misspelt `max_token` must not be silently dropped.

Source: https://platform.openai.com/docs/api-reference/chat/create and …/completions/create (read 2025), and
vLLM's `ChatCompletionRequest`.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from dynamo_local.components import limits
from dynamo_local.components.openai.errors import ApiError, bad_param

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
    "prompt_logprobs": (),
    "use_beam_search": (False,),
}

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = _BOTH | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": (),
    "web_search_options": (),
}
"""Name -> the values that ask for nothing (null is always one of them)."""

UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = _BOTH | {
    "suffix": ("",),
}

NVEXT = ("ignore_eos", "min_tokens", "stop_token_ids", "top_k")
"""vLLM's sampling extras. Taken at the top level, or in Dynamo's `nvext` object (the top level wins)."""


Raw = msgspec.Raw
Unsupported = Mapping[str, tuple[Any, ...]]


class Fields:
    """Splits a body into its parameters, each still as JSON: what is not looked at costs no more than being skipped.

    `known` are the parameters of the request's schema.
    """

    def __init__(self, known: Iterable[str], unsupported: Unsupported) -> None:
        self._known = frozenset(known)
        self._unsupported = unsupported
        names = sorted(self._known | unsupported.keys() | IGNORED | {"nvext"})
        self._decoder = msgspec.json.Decoder(_raw_struct("Body", names))

    def split(self, body: bytes) -> dict[str, Raw]:
        """Only what the request schema knows and the client really set (null means "not set" throughout OpenAI's API).

        Raises `ApiError` 400: no JSON object, a parameter that is unsupported or unknown, one that is too long.
        """
        given = _given(_object(self._decoder, body, self._known | IGNORED))
        if (nvext := given.pop("nvext", None)) is not None:
            given = {**_nvext(nvext), **given}
        for name, value in given.items():
            if name in self._unsupported and name not in self._known:
                self._check_neutral(name, value)
        kept = {name: value for name, value in given.items() if name in self._known}
        for name, value in kept.items():
            if len(bytes_of(value)) > _MAX_BYTES.get(name, limits.MAX_FIELD_BYTES):
                raise bad_param(name, f"`{name}` is too long: {len(bytes_of(value)):,} bytes.")
        return kept

    def _check_neutral(self, name: str, value: Raw) -> None:
        neutral = self._unsupported[name]
        if len(bytes_of(value)) > _NEUTRAL_BYTES or not any(_same(_decoded(value), item) for item in neutral):
            raise _unsupported(name, neutral)


_NEUTRAL_BYTES = 256
"""No value that asks for nothing is longer than this."""

_MAX_BYTES: Mapping[str, int] = {
    "messages": sys.maxsize,
    "input": sys.maxsize,
    "instructions": sys.maxsize,
    "system": sys.maxsize,
    "tokens": sys.maxsize,
    "prompt": sys.maxsize,
    "stop": limits.MAX_STOP_BYTES,
    "bad_words": limits.MAX_STOP_BYTES,
    "tools": limits.MAX_TOOLS_BYTES,
    "response_format": limits.MAX_SCHEMA_BYTES,
    "structured_outputs": limits.MAX_SCHEMA_BYTES,
}
"""The first ones are what a body is for: `max_body_bytes` is their bound."""

_UNKNOWN = re.compile(r"contains unknown field `(?P<name>.*)`", re.DOTALL)


_ABSENT = Raw()


def bytes_of(value: Raw) -> memoryview:
    """A parameter's JSON, without a copy."""
    return memoryview(value)


def _raw_struct(name: str, fields: Iterable[str]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [(field, Raw, _ABSENT) for field in fields], forbid_unknown_fields=True, gc=False)


def _given(fields: msgspec.Struct) -> dict[str, Raw]:
    # A hundred names, of which a request has five: those are told from the others without reading any.
    values = zip(fields.__struct_fields__, msgspec.structs.astuple(fields), strict=True)
    return {name: value for name, value in values if value is not _ABSENT and bytes_of(value) not in (b"", b"null")}


def _object(decoder: msgspec.json.Decoder[msgspec.Struct], body: bytes | Raw, near: Iterable[str]) -> msgspec.Struct:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            raise _unknown(unknown["name"], near) from None
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def not_json(error: Exception) -> ApiError:
    """The body cannot be read at all."""
    return ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json")


_nvext_decoder = msgspec.json.Decoder(_raw_struct("Nvext", NVEXT))


def _nvext(value: Raw) -> dict[str, Raw]:
    """The members of Dynamo's `nvext` object. Raises `ApiError` for one we do not know."""
    try:
        return _given(_nvext_decoder.decode(value))
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            name = f"nvext.{limits.shortened(unknown['name'])}"
            message = f"`{name}` is not supported; `nvext` may hold {', '.join(NVEXT)}."
            raise ApiError(400, message, param=name, code="unsupported_parameter") from None
        raise ApiError(400, "`nvext` must be an object.", param="nvext", code="invalid_type") from None


def _decoded(value: Raw) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def _same(value: Any, neutral: Any) -> bool:
    # In Python True == 1 and False == 0, but `logprobs: 0` is not `logprobs: false`.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _unsupported(name: str, neutral: tuple[Any, ...]) -> ApiError:
    allowed = "leave it out" + "".join(f" or send {item!r}" for item in neutral)
    message = f"The parameter `{name}` is not supported by this server; {allowed}."
    return ApiError(400, message, param=name, code="unsupported_parameter")


def _unknown(name: str, known: Iterable[str]) -> ApiError:
    # Looking for a near name takes time that grows with the square of its length.
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= limits.MAX_NAME_LENGTH else []
    name = limits.shortened(name)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    return ApiError(400, f"Unknown parameter: `{name}`{hint}", param=name, code="unknown_parameter")
