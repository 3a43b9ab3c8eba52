"""The messages between a Frontend and the worker beside an HTTP server.

The request is an `Ask`. The answer is a `{"status", "headers"}` and then either `{"part": bytes}`, pieces of an answer
that is given whole, or plain `bytes`, pieces of a stream that the client gets at once. A later head
starts the answer over: what came before it was from a worker that failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_local.components.openai.http_io import Whole
from dynamo_local.errors import DynamoError, UpstreamError, WorkerBusy

PART_BYTES = 256 * 1024
"""A large answer travels in pieces of this size: a frame has a limit."""

REFUSALS = (429, 503)
"""A server that is full says so with these; another one may take the request."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer."""

    status: int
    headers: Mapping[str, str]

    def item(self) -> dict[str, Any]:
        """As it travels over the request plane."""
        return {"status": self.status, "headers": dict(self.headers)}


def parse_head(item: Mapping[str, Any]) -> Head:
    """The head in an item that is no piece of a body."""
    return Head(int(item["status"]), dict(item["headers"]))


def parts(body: bytes) -> Iterator[dict[str, bytes]]:
    """The items of a body that is given whole."""
    for at in range(0, len(body), PART_BYTES):
        yield {"part": body[at : at + PART_BYTES]}


def produced(batch: Sequence[Any]) -> bool:
    """Whether the client may have got a part of this batch: then the request cannot be sent to another server."""
    return any(isinstance(item, bytes) for item in batch)


def refused(who: str, answer: Whole) -> DynamoError:
    """The error for an answer that another server may improve on; it carries the answer."""
    details: dict[str, Any] = {
        "answer": {"status": answer.status, "headers": dict(answer.headers), "body": answer.body}
    }
    if answer.status in REFUSALS:
        given = answer.headers.get("retry-after", "")
        if given.isdigit():
            details["retry_after_s"] = float(given)
        return WorkerBusy(f"{who} takes no request now: it answered {answer.status}", **details)
    return UpstreamError(f"{who} failed: it answered {answer.status}; its log has the reason", **details)


def answer_of(error: DynamoError) -> Whole | None:
    """The server's own answer, if the error carries one."""
    told = error.details.get("answer")
    if not isinstance(told, dict) or not isinstance(told.get("body"), bytes):
        return None
    return Whole(int(told["status"]), told["body"], dict(told["headers"]))
