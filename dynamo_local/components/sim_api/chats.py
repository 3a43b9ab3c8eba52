"""Other APIs' requests as chats: what they share. Everything is checked once, where a chat is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from dynamo_local.components.openai import requests as params
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.openai.requests import ParsedRequest, decode, parse_chat, values_of

T = TypeVar("T")


def parsed_as_chat(chat: Mapping[str, Any], told: Mapping[str, Any], names: Mapping[str, str]) -> ParsedRequest:
    """The chat as a request with extras. `names` are what a chat's parameters are called in this API."""
    try:
        request = parse_chat(msgspec.json.encode({name: value for name, value in chat.items() if value is not None}))
    except ApiError as error:
        if error.param is None:
            raise
        first = error.param.split(".")[0].split("[")[0]
        param = names.get(first, error.param)
        message = error.message.replace(f"`{error.param}`", f"`{param}`")
        raise ApiError(error.status, message, param=param, code=error.code) from None
    return replace(request, payload={"extras": {}, **request.payload}, told=told)


def optional(decoder: msgspec.json.Decoder[T], fields: Mapping[str, msgspec.Raw], name: str) -> T | None:
    """The field of that name; None where it is absent."""
    return decode(decoder, fields[name], name) if name in fields else None


def text_of(raw: msgspec.Raw, param: str, kinds: Sequence[str]) -> str:
    """A content that is a string, or a list of parts of these types."""
    if not params.bytes_of(raw):
        return ""
    if params.bytes_of(raw)[:1] == b"[":
        return "\n".join(_part(part, f"{param}[{n}]", kinds) for n, part in enumerate(values_of(raw, param)))
    return decode(_text, raw, param)


def _part(raw: msgspec.Raw, param: str, kinds: Sequence[str]) -> str:
    part = decode(_part_decoder, raw, param)
    if part.type not in kinds or part.text is None:
        raise bad_param(param, f"`{param}` must be a part of type {' or '.join(kinds)}; this server takes text only.")
    return part.text


class _Part(msgspec.Struct, frozen=True, gc=False):
    type: str
    text: str | None = None


_text = msgspec.json.Decoder(str)
_part_decoder = msgspec.json.Decoder(_Part)


def joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that follow an assistant's message, or each other, become one message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and out and out[-1]["role"] == "assistant":
            out[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            out.append(message)
    return out


def call_of(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """An assistant's message with one call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id_, "type": "function", "function": function}]}
