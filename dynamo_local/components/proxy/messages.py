"""A request as a Frontend passes it to the worker beside an HTTP server.

Apart from `payloads`, because that worker's own module imports it: it must be quick."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import Field

from dynamo_local.components.openai.http_io import Whole
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.errors import DynamoError, InvalidRequest, UpstreamError, WorkerBusy


class Ask(msgspec.Struct, frozen=True):
    """A POST. `tokens` bounds what it may generate; None where the request does not say."""

    path: str
    body: bytes
    headers: dict[str, str]
    tokens: int | None = None

    def payload(self) -> dict[str, Any]:
        """As it travels over the request plane."""
        return msgspec.structs.asdict(self)


def parse_ask(payload: Any) -> Ask:
    """The ask that `payload` made. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(payload, Ask, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this is no HTTP request from a Frontend: {error}") from None


# --- The messages between a Frontend and the worker beside an HTTP server.
#
# The request is an `Ask`. The answer is a `{"status", "headers"}` and then either `{"part": bytes}`, pieces of an
# answer
# that is given whole, or plain `bytes`, pieces of a stream that the client gets at once. A later head
# starts the answer over: what came before it was from a worker that failed.

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
    """The error that carries an answer which another server may improve on."""
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
    answer = error.details.get("answer")
    if not isinstance(answer, dict) or not isinstance(answer.get("body"), bytes):
        return None
    return Whole(int(answer["status"]), answer["body"], dict(answer["headers"]))


# --- The options of the Frontend before HTTP servers: its section in the YAML file.


class HttpFrontendConfig(FrontendConfig):
    """Options of the `Frontend` service in a graph of `runtime: http` sections."""

    router: Literal["least-loaded", "kv-load", "round-robin", "random"] = Field(
        default="least-loaded",
        description="How a server is picked: fewest requests; by KV use and waiting requests; in turn; by chance.",
    )
    max_tries: int = Field(
        default=3, ge=1, le=16, description="Servers that may fail a request before its first byte until it fails."
    )
    prefill_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a request waits for a prefill server before it is prefilled where it is decoded.",
    )
