"""From an OpenAI body (as the Frontend validated it) to what a worker is asked. Pure, apart from the tokenizer.

Everything that can be known to be wrong is refused here, before any worker is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dynamo_local.components.tokenizer import Tokenizer
from dynamo_local.errors import InvalidRequest
from dynamo_local.ports import SamplingParams

Kind = Literal["chat", "completion"]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; a chat may use what is left of the context."""

PROMPT_PARAM: Mapping[Kind, str] = {"chat": "messages", "completion": "prompt"}


class _Options(msgspec.Struct, frozen=True):
    """The keys of the body that become sampling parameters. None means that the client did not say."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request, ready to be sent. `stop` are strings for the detokenizer, ids are in `sampling`."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stop: tuple[str, ...]


def prepare(kind: Kind, body: Mapping[str, Any], tokenizer: Tokenizer, max_model_len: int) -> Prepared:
    """Tokens, sampling parameters and stop strings of a request.

    Raises `InvalidRequest`, naming the parameter: messages or prompt that cannot be used or are too long
    (`prompt + 1 > max_model_len`), `max_tokens` that does not fit behind the prompt, a value of a wrong type.
    """
    try:
        options = msgspec.convert(body, _Options)
    except msgspec.ValidationError as error:
        param = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0]
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    if kind == "chat":
        token_ids = tokenizer.encode_chat(body.get("messages"), body.get("tools"))
    else:
        token_ids = tokenizer.encode_prompt(body.get("prompt"))
    max_tokens = _max_tokens(kind, options.max_tokens, len(token_ids), max_model_len)
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    return Prepared(
        request_id=str(body.get("request_id") or ""),
        token_ids=token_ids,
        sampling=_sampling(options, max_tokens, tokenizer.eos_token_ids),
        stop=tuple(text for text in stop if text),
    )


def _max_tokens(kind: Kind, asked: int | None, prompt_tokens: int, max_model_len: int) -> int:
    left = max_model_len - prompt_tokens
    if left < 1:
        raise InvalidRequest(
            f"the prompt is {prompt_tokens} tokens long and leaves no room for an answer: the model's context is "
            f"{max_model_len} tokens, prompt and answer together; shorten the prompt",
            param=PROMPT_PARAM[kind],
            code="context_length_exceeded",
        )
    if asked is None:
        return left if kind == "chat" else min(COMPLETION_MAX_TOKENS, left)
    if asked < 1:
        raise InvalidRequest(f"max_tokens must be 1 or more, not {asked}", param="max_tokens")
    if asked > left:
        raise InvalidRequest(
            f"max_tokens {asked} and a prompt of {prompt_tokens} tokens exceed the model's context of {max_model_len} "
            f"tokens; ask for at most {left}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return asked


def _sampling(options: _Options, max_tokens: int, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    given = {
        name: value
        for name in ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "ignore_eos")
        if (value := getattr(options, name)) is not None
    }
    eos = () if options.ignore_eos else eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=options.top_k or -1,  # 0 means "all" in OpenAI-like clients, which vLLM writes as -1
        stop_token_ids=tuple(dict.fromkeys([*(options.stop_token_ids or ()), *eos])),
        min_tokens=options.min_tokens or 0,
        **given,
    )
