"""JSON to typed values by msgspec, and its complaints in OpenAI's manner: with the parameter named."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.openai import params
from dynamo_local.components.openai.errors import ApiError, bad_param

T = TypeVar("T")

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PartType = Literal["text"]
MessageRole = Literal["system", "developer", "user", "assistant", "tool"]

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>[^`]*)`")
_ERROR_ENDS = 200
_CHOICES = {"].type": get_args(PartType), "].role": get_args(MessageRole)}
_MAP_INDEX = re.compile(r"\[\.\.\.\]")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, param: str = "") -> T:
    """Raises `ApiError` 400 that names the parameter; `param` is where the body is from, if it is a part."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise params.not_json(error) from error


def invalid(text: str, param: str) -> ApiError:
    """msgspec's "Expected `int` >= 1 - at `$.max_tokens`" in OpenAI's manner, with the parameter named."""
    if len(text) > 2 * _ERROR_ENDS:  # it repeats a value of the client's
        text = f"{text[:_ERROR_ENDS]}…{text[-_ERROR_ENDS:]}"
    found = _PATH.search(text)
    inner = _MAP_INDEX.sub("", found["path"]) if found else ""
    path = f"{param}.{inner}" if param and inner and not inner.startswith("[") else param + inner
    detail = _PATH.sub("", text)
    for pattern, code, verb in (
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
        (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
    ):
        if member := pattern.search(detail):
            name = limits.shortened(member["name"])
            param = f"{path}.{name}" if path else name
            return bad_param(param, f"{verb}: `{param}`.", code)
    for end, choices in _CHOICES.items():
        if path.startswith("messages") and path.endswith(end) and "enum value" in detail:
            detail += f" (allowed: {', '.join(choices)})"
    code = "invalid_type" if ", got `" in detail else "invalid_value"
    return bad_param(path, f"Invalid value for `{path}`: {detail[:1].lower()}{detail[1:]}.", code)


def _bounded_array() -> msgspec.json.Decoder[msgspec.Struct]:
    """Of 1 to `MAX_MESSAGES` values, none of which is made. It stops at the first beyond them; a list would be
    measured when all of it has been read."""
    fields = [(f"_{n}", msgspec.Raw, msgspec.Raw()) for n in range(1, limits.MAX_MESSAGES)]
    array = msgspec.defstruct("Array", [("_0", msgspec.Raw), *fields], array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(array)


_bounded_decoder = _bounded_array()


def values_of(raw: msgspec.Raw, param: str) -> list[msgspec.Raw]:
    """The values of a list, none of which is made; `MAX_MESSAGES` at most. Raises `ApiError` 400."""
    return [value for value in msgspec.structs.astuple(decode(_bounded_decoder, raw, param)) if params.bytes_of(value)]
