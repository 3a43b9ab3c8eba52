"""One response as it comes: a worker's items in, the items that the Frontend gets out."""

from __future__ import annotations

from typing import Any

from dynamo_local.components.routing.dispatch import Batch
from dynamo_local.components.text.detokenizer import Detokenizer
from dynamo_local.components.text.prepare import Prepared
from dynamo_local.errors import EngineError


class Answer:
    """Accumulates one response: batches of worker items in, response items out."""

    def __init__(self, request: Prepared, detokenizer: Detokenizer) -> None:
        self._prompt_tokens = len(request.token_ids)
        self.max_tokens = request.sampling.max_tokens
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
