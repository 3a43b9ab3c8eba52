"""One Processor's work without the process around it: an OpenAI body in, response items out.

The first item comes as soon as a worker has taken the request (`num_tokens: 0` and `prompt_tokens`); the last has a
`finish_reason` and the `usage`. Tokens that arrived in one frame become one item.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from dynamo_local.components import messages
from dynamo_local.components.large_requests import run_by_size
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.routing.dispatch import Batch, Dispatcher
from dynamo_local.components.text.detokenizer import Detokenizer
from dynamo_local.components.text.prepare import Kind, Prepared, prepare
from dynamo_local.components.text.tokenizer import Tokenizer
from dynamo_local.errors import EngineError, NoWorkers

FIRST_CARD_TIMEOUT_S = 1.0
"""How long a request waits for the first model card: only right after the start, while etcd is being read."""


class Pipeline:
    """Prepares a request, has it dispatched, and turns the tokens into text. `model` is the one meant by default."""

    def __init__(self, tokenizer: Tokenizer, models: ModelsView, dispatcher: Dispatcher, model: str) -> None:
        self._tokenizer = tokenizer
        self._models = models
        self._dispatcher = dispatcher
        self._model = model

    async def run(self, kind: Kind, payload: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """Response items of a `TextRequest`, or of what one is made from.

        Raises `InvalidRequest`, `NoWorkers`, `WorkerBusy`, or what the worker failed with.
        """
        asked = messages.parse_text_request(payload)
        max_model_len = await self._max_model_len(asked.model or self._model)
        request = await run_by_size(messages.size_of(asked), prepare, kind, asked, self._tokenizer, max_model_len)
        request_id = request.request_id or uuid.uuid4().hex
        generate = messages.generate_request(request_id, request.token_ids, request.sampling)
        answer = _Answer(request, self._tokenizer.detokenizer(request.stop, request.sampling.min_tokens))
        batches = self._dispatcher.send(
            generate, request_id=request_id, tokens=request.sampling.max_tokens, timeout_s=timeout_s
        )
        async with contextlib.aclosing(batches):
            async for batch in batches:
                for item in answer.take(batch):
                    yield item
                if answer.finish_reason is not None:
                    return  # a stop string: closing the batches aborts the request in the engine
        raise EngineError(f"the worker's answer to {request_id} ended without a finish reason")

    async def _max_model_len(self, model: str) -> int:
        """The context length of the model's workers, in tokens. Raises `NoWorkers` while none serves it."""
        served = self._models.get(model)
        if served is None and await self._models.wait_ready(FIRST_CARD_TIMEOUT_S):
            served = self._models.get(model)
        if served is None or served.max_model_len is None:  # None: an HTTP server's model, no Processor can call it
            names = ", ".join(m.name for m in self._models.models()) or "none"
            raise NoWorkers(f"no ready worker serves the model {model!r} (served now: {names})")
        return served.max_model_len


class _Answer:
    """Accumulates one response: batches of worker items in, response items out."""

    def __init__(self, request: Prepared, detokenizer: Detokenizer) -> None:
        self._prompt_tokens = len(request.token_ids)
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._detokenizer = detokenizer
        self._announced = False
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.finish_reason: str | None = None

    def take(self, batch: Batch) -> list[dict[str, Any]]:
        """Response items for what arrived in one frame: usually one."""
        items: list[dict[str, Any]] = []
        if not self._announced:
            self._announced = True
            items.append({**_item("", 0), "prompt_tokens": self._prompt_tokens})
        token_ids, reason = self._merge(batch)
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
        items.append(_item(text, count, reason, self._usage() if reason is not None else None))
        return items

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
