"""The `prompt` of a completions request: one or several, each text or token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.components import limits
from dynamo_local.components.openai import params
from dynamo_local.components.openai.decoding import TokenId, decode, values_of
from dynamo_local.components.openai.errors import ApiError, bad_param

Prompt = str | list[int]

_text_decoder = msgspec.json.Decoder(str)
_ids_decoder = msgspec.json.Decoder(list[TokenId])

_BEGINNING_BYTES = 64
"""Enough for the two characters that say what a prompt is, and for white space between them."""


def read_prompt(raw: msgspec.Raw) -> tuple[Prompt | None, list[Prompt]]:
    """One prompt (also as a batch of one), or several. Its beginning says what it is: only that is made of it."""
    begins = b"".join(bytes(params.bytes_of(raw)[:_BEGINNING_BYTES]).split())[:2]
    if begins[:1] != b"[":
        return _not_empty(decode(_text_decoder, raw, "prompt")), []
    if begins[1:] == b'"':
        return _several(raw, _text_decoder)
    if bytes(raw).count(b",") >= limits.MAX_PROMPT_IDS:
        raise bad_param("prompt", f"`prompt` holds more than {limits.MAX_PROMPT_IDS:,} token ids.")
    if begins[1:] == b"[":
        return _several(raw, _ids_decoder)
    return _not_empty(decode(_ids_decoder, raw, "prompt")), []


def _several(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> tuple[Prompt | None, list[Prompt]]:
    values = values_of(raw, "prompt")
    if len(values) > limits.MAX_CHOICES:
        raise bad_param("prompt", f"`prompt` holds more than {limits.MAX_CHOICES} prompts.")
    prompts = [_not_empty(decode(decoder, value, f"prompt[{n}]")) for n, value in enumerate(values)]
    return (prompts[0], []) if len(prompts) == 1 else (None, prompts)


def _not_empty(prompt: Prompt) -> Prompt:
    if not prompt:
        raise _empty()
    return prompt


def _empty() -> ApiError:
    return bad_param("prompt", "`prompt` must not be empty.")
