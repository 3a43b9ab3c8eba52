"""Passes a Frontend's requests on to the HTTP server beside this worker, and its answers back as they come."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx

from dynamo_local.components.commands.metrics import OwnRequests
from dynamo_local.components.openai.http_io import Whole
from dynamo_local.components.proxy import messages as payloads
from dynamo_local.components.proxy.app import SENT_BACK, pick_headers
from dynamo_local.components.proxy.messages import parse_ask
from dynamo_local.core.served import Served
from dynamo_local.errors import WorkerLost
from dynamo_local.system import tracing

log = logging.getLogger("dynamo_local.worker")

CONNECT_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""The largest answer that is given whole."""

EVENT_STREAM = "text/event-stream"
FAILED = 500


class Streams:
    """Our own connections: how many tokens each may still bring. None: the request has no limit.

    `served` counts what came over them, for a server that has no such metrics. An event counts as a token.
    """

    def __init__(self) -> None:
        self._left: dict[object, int | None] = {}
        self._heard_s: dict[object, float] = {}
        self._began: set[object] = set()
        self.served = Served()
        self.bound_if_unsaid = 0
        """The limit of a request without one: the model's length, in tokens; 0 if that is not known."""

    @contextlib.contextmanager
    def one(self, tokens: int | None) -> Iterator[object]:
        """While this is open, count one connection that may bring `tokens` tokens; gives the key for `passed`."""
        key = object()
        self._left[key] = tokens
        self._heard_s[key] = time.monotonic()
        try:
            yield key
        finally:
            del self._left[key], self._heard_s[key]
            self._began.discard(key)
            self.served.ended()

    def passed(self, key: object, events: int) -> None:
        """So many events, each of at least one token, have come."""
        left = self._left[key]
        if left is None:
            left = self.bound_if_unsaid
        self._left[key] = max(0, left - events)
        if events:
            now_s = time.monotonic()
            gap_s, self._heard_s[key] = now_s - self._heard_s[key], now_s
            if key in self._began:
                self.served.more(gap_s, events)
            else:
                self._began.add(key)
                self.served.first(gap_s, events)

    def own(self) -> OwnRequests:
        """All of them together."""
        tokens = sum(self.bound_if_unsaid if left is None else left for left in self._left.values())
        return OwnRequests(len(self._left), tokens)


class ServerCalls:
    """One server. `base_url` is `http://127.0.0.1:PORT`."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.streams = Streams()
        # No pool limit: the server itself limits its requests. No proxy, whatever the environment says: the
        # server is on this host.
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def answer(self, payload: Any) -> AsyncGenerator[Any, None]:
        """The items of `components.proxy.messages`; closing the generator closes the connection, so the server stops.

        Raises `InvalidRequest`, `WorkerLost` (no connection, or it broke), `WorkerBusy` or `UpstreamError` for an
        answer that another server may do better than.
        """
        ask = parse_ask(payload)
        # identity: a compressed stream could not be split into events.
        headers = {**ask.headers, **(tracing.carrier() or {}), "accept-encoding": "identity"}
        request = self._http.build_request("POST", ask.path, content=ask.body, headers=headers)
        with self.streams.one(ask.tokens) as key:
            try:
                response = await self._http.send(request, stream=True)
                async with contextlib.aclosing(response):
                    if response.status_code == httpx.codes.OK and _streams(response):
                        async for item in self._events(response, key):
                            yield item
                    else:
                        for item in await self._whole(response):
                            yield item
            except httpx.HTTPError as error:
                raise WorkerLost(
                    f"the server at {self._base_url} broke the connection off ({_text(error)}); send the request again"
                ) from error

    async def _events(self, response: httpx.Response, key: object) -> AsyncGenerator[Any, None]:
        yield _head(response).item()
        async for piece in response.aiter_raw():
            self.streams.passed(key, piece.count(b"\n\n"))
            yield piece

    async def _whole(self, response: httpx.Response) -> list[dict[str, Any]]:
        pieces: list[bytes] = []
        size = 0
        async for piece in response.aiter_raw():
            size += len(piece)
            if size > ANSWER_BYTES_MAX:
                raise WorkerLost(f"the server's answer is larger than {ANSWER_BYTES_MAX} bytes")
            pieces.append(piece)
        head, body = _head(response), b"".join(pieces)
        if head.status >= FAILED or head.status in payloads.REFUSALS:
            raise payloads.refused(f"the server at {self._base_url}", Whole(head.status, body, head.headers))
        return [head.item(), *payloads.parts(body)]

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def _streams(response: httpx.Response) -> bool:
    return str(response.headers.get("content-type", "")).startswith(EVENT_STREAM)


def _head(response: httpx.Response) -> payloads.Head:
    return payloads.Head(response.status_code, pick_headers(response.headers.items(), SENT_BACK))


def _text(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
