"""From an OpenAI body (as the Frontend validated it) to what a worker is asked. Pure, apart from the tokenizer.

Everything that can be known to be wrong is refused here, before any worker is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dynamo_local.components.dispatcher import Batch
from dynamo_local.components.messages import TextRequest, continued
from dynamo_local.components.text.detokenizer import Detokenizer
from dynamo_local.errors import EngineError, InvalidRequest
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import SamplingParams

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer

Kind = Literal["chat", "completion"]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; a chat may use what is left of the context."""

PROMPT_PARAM: Mapping[Kind, str] = {"chat": "messages", "completion": "prompt"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request, ready to be sent. `stop` are strings for the detokenizer, ids are in `sampling`."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stop: tuple[str, ...]


def prepare(kind: Kind, request: TextRequest, tokenizer: Tokenizer, max_model_len: int) -> Prepared:
    """Tokens, sampling parameters and stop strings of a request.

    Raises `InvalidRequest`, naming the parameter: messages or prompt that cannot be used or are too long
    (`prompt + 1 > max_model_len`), `max_tokens` that does not fit behind the prompt.
    """
    token_ids = token_ids_of(kind, request, tokenizer, max_model_len)
    max_tokens = _max_tokens(kind, request.max_tokens, len(token_ids), max_model_len)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return Prepared(
        request_id=request.request_id,
        token_ids=token_ids,
        sampling=_sampling(request, max_tokens, tokenizer.eos_token_ids),
        stop=tuple(text for text in stop if text),
    )


def token_ids_of(
    kind: Kind,
    request: TextRequest,
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """The prompt's tokens. Special ones are added to a text by default, and to a chat not: its template writes them.

    Raises `InvalidRequest` for what cannot be used, or is surely too long.
    """
    if kind == "chat":
        text = _rendered(request, tokenizer)
        if tokenizer.surely_exceeds(text, max_model_len):
            raise _no_room(kind, f"more than {max_model_len}", max_model_len)
        return tokenizer.encode(text, add_special_tokens=bool(add_special_tokens))
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) >= max_model_len:
        raise _no_room(kind, str(len(prompt)), max_model_len)
    if isinstance(prompt, str) and tokenizer.surely_exceeds(prompt, max_model_len):
        raise _no_room(kind, f"more than {max_model_len}", max_model_len)
    if add_special_tokens is False and isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=False)
    return tokenizer.encode_prompt(prompt)


def _rendered(request: TextRequest, tokenizer: Tokenizer) -> str:
    messages, extras = msgspec.to_builtins(request.messages), request.extras
    if extras is None:
        return tokenizer.render(messages)
    tools = extras.tools
    shown = None if tools is None or tools.choice == "none" else tools.for_template()
    return tokenizer.render(messages, shown, extras.template)


def _no_room(kind: Kind, tokens: str, max_model_len: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt is {tokens} tokens long and leaves no room for an answer: the model's context is "
        f"{max_model_len} tokens, prompt and answer together; shorten the prompt",
        param=PROMPT_PARAM[kind],
        code="context_length_exceeded",
    )


def _max_tokens(kind: Kind, max_tokens: int | None, prompt_tokens: int, max_model_len: int) -> int:
    left = max_model_len - prompt_tokens
    if left < 1:
        raise _no_room(kind, str(prompt_tokens), max_model_len)
    if max_tokens is None:
        return left if kind == "chat" else min(COMPLETION_MAX_TOKENS, left)
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be 1 or more, not {max_tokens}", param="max_tokens")
    if max_tokens > left:
        raise InvalidRequest(
            f"max_tokens {max_tokens} and a prompt of {prompt_tokens} tokens exceed the model's context of "
            f"{max_model_len} tokens; ask for at most {left}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return max_tokens


def _sampling(options: TextRequest, max_tokens: int, eos_token_ids: tuple[int, ...]) -> SamplingParams:
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


# --- One response: a worker's items in, the Frontend's items out.


class Answer:
    """Accumulates one response: batches of worker items in, response items out."""

    def __init__(self, request: Prepared, detokenizer: Detokenizer, trace_block_size: int = 0) -> None:
        self._traced = (request.token_ids, trace_block_size) if trace_block_size else None
        self._worker = 0
        self._routed_s: float | None = None
        self._prompt_tokens = len(request.token_ids)
        self.max_tokens = request.sampling.max_tokens
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._detokenizer = detokenizer
        self._announced = False
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.finish_reason: str | None = None
        self._given: list[int] = []
        self._migrations = 0

    def take(self, batch: Batch) -> list[dict[str, Any]]:
        """Response items for what arrived in one frame: usually one."""
        items: list[dict[str, Any]] = []
        if not self._announced:
            self._announced = True
            first = {**_item("", 0), "prompt_tokens": self._prompt_tokens, "routed_s": self._routed_s}
            if (hit_rate := batch[0].get("kv_hit_rate")) is not None:
                first["kv_hit_rate"] = hit_rate
            items.append(first)
        token_ids, reason = self._merge(batch)
        self._given += token_ids
        phases = next((item["phases"] for item in batch if "phases" in item), None)
        if not token_ids and reason is None:
            return items
        if reason in ("error", "abort"):
            raise EngineError(f"the engine ended the request with {reason!r}; the worker's log has the reason")
        silent = 0
        if reason == "stop" and token_ids and token_ids[-1] in self._stop_ids:
            token_ids, silent = token_ids[:-1], 1  # it counts as a token, but its text is not part of the answer
        piece = self._detokenizer.feed(token_ids)
        text, count = piece.text, piece.num_tokens + silent
        if piece.stopped:
            reason, count = "stop", piece.num_tokens
        elif reason is not None:
            rest = self._detokenizer.finish()
            text += rest.text
            reason = "stop" if rest.stopped else reason
        self._completion_tokens += count
        self.finish_reason = reason
        found = _item(text, count, reason, self._usage() if reason is not None else None)
        if phases is not None:
            found["phases"] = phases
        if self._migrations:
            found["migrations"], self._migrations = self._migrations, 0
        if reason is not None and self._worker:
            found["worker"] = self._worker
        if reason is not None and self._traced is not None:  # at the end: its hashes cost the first token nothing
            found["trace"] = self._trace(*self._traced)
        items.append(found)
        return items

    def continued(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The generate request that goes on after the tokens so far, at another worker; None: it cannot, or is
        complete."""
        found = continued(request, self._given) if self.finish_reason is None else None
        self._migrations += found is not None
        return found

    def chosen(self, worker: int, after_s: float) -> None:
        """The worker that is asked now, so long after the request was given to the dispatcher."""
        if self._routed_s is None:
            self._routed_s = after_s
        self._worker = worker

    def _trace(self, token_ids: list[int], block_size: int) -> dict[str, Any]:
        """The blocks of the prompt by their hashes, the last one not always full, and the worker."""
        hashes = block_hashes(token_ids, block_size)
        if rest := token_ids[len(hashes) * block_size :]:
            hashes += block_hashes(rest, len(rest), parent=hashes[-1] if hashes else None)
        return {"hashes": hashes, "worker": self._worker}

    def _merge(self, batch: Batch) -> tuple[list[int], str | None]:
        token_ids: list[int] = []
        reason: str | None = None
        for item in batch:
            token_ids += item["token_ids"]
            reason = item.get("finish_reason")
            self._cached_tokens = max(self._cached_tokens, item.get("num_cached_tokens") or 0)
        return token_ids, reason

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def _item(
    text: str, num_tokens: int, finish_reason: str | None = None, usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"text": text, "num_tokens": num_tokens, "finish_reason": finish_reason, "usage": usage}
