"""The two routes that generate: an HTTP request becomes a call of the Processor, its items become the answer.

The status line of a stream waits for the first real item (text, a token or the end): the Processor sends the
prompt's length before a worker has taken the request, and "full" must still be able to become a 429.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from dynamo_local.clock import Clock, reader
from dynamo_local.components.dispatcher import TRIED
from dynamo_local.components.http_metrics import Endpoint, RequestObserver
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.requests import ParsedRequest, Parser, parse_chat, parse_completion
from dynamo_local.components.openai.responses import ChatFormat, CompletionFormat, ResponseFormat, ResponseHead
from dynamo_local.components.openai.route import HttpDeps, ModelRoute
from dynamo_local.components.sim_api.formats import Gathered, RichChat, RichCompletion, RichFormat
from dynamo_local.components.sim_api.messages_api import MessagesFormat, parse_messages
from dynamo_local.components.sim_api.responses_api import ResponsesFormat, parse_responses
from dynamo_local.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineError,
    KvTransferError,
    RequestCancelled,
    StreamGap,
    WorkerDraining,
    WorkerLost,
)
from dynamo_local.ports import EndpointClient, ResponseStream
from dynamo_local.transport.requests.stream import Take, pump

logger = logging.getLogger(__name__)

CALL_ATTEMPTS = 3
"""A Processor that is leaving, or just died, has produced nothing: the next one may be asked."""

LOST = (WorkerLost, StreamGap, KvTransferError)
"""What was computed is gone, and somebody else can compute it."""

END_WAIT_S = 0.25
"""The stream should end right after the last item; a Processor that does not end it is cut off after this."""

CLOSE_TIMEOUT_S = 5.0
"""Bound of cancelling a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendDeps(HttpDeps):
    """All that the application works with; a test gives fakes.

    `chat` and `completions` are the Processor's endpoints `chat/completions` and `completions`.
    """

    chat: EndpointClient
    completions: EndpointClient
    api: EndpointClient | None = None
    """The Processor's endpoint `api`; None where it has none."""
    texts: EndpointClient | None = None
    """The Processor's endpoint `texts`; None: nothing is tokenised for clients."""


@dataclass(frozen=True, slots=True)
class Api:
    """What differs between the routes."""

    endpoint: Endpoint
    parse: Parser
    format: Callable[[ResponseHead], ResponseFormat]
    rich: Callable[[ResponseHead, ParsedRequest], RichFormat]
    """For requests with extras."""


CHAT = Api("chat_completions", parse_chat, ChatFormat, RichChat)
COMPLETIONS = Api("completions", parse_completion, CompletionFormat, RichCompletion)
RESPONSES = Api("responses", parse_responses, ChatFormat, ResponsesFormat)
MESSAGES = Api("messages", parse_messages, ChatFormat, MessagesFormat)


class GenerationRoute(ModelRoute[ParsedRequest]):
    """The ASGI application of one route."""

    def __init__(self, api: Api, client: EndpointClient, deps: FrontendDeps) -> None:
        super().__init__(api.endpoint, deps)
        self._api = api
        self._client = client

    def parse(self, body: bytes, scope: Scope) -> ParsedRequest:
        return self._api.parse(body)

    async def answer(
        self, request: ParsedRequest, request_id: str, observer: RequestObserver, reply: Reply
    ) -> Whole | None:
        kind = RichGeneration if "extras" in request.payload else Generation
        return await kind(self._api, self._client, request, request_id, observer, self._deps).run(reply)


async def call_processor(client: EndpointClient, payload: Any, request_id: str, timeout_s: float) -> ResponseStream:
    """A Processor's answer; another one is asked where the first is leaving."""
    for attempt in range(1, CALL_ATTEMPTS + 1):
        try:
            return await client.call(payload, request_id=request_id, timeout_s=timeout_s)
        except (WorkerDraining, WorkerLost) as error:
            if attempt == CALL_ATTEMPTS:
                raise
            logger.info("request %s: asking another Processor, this one said: %s", request_id, error)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def until_answered(once: Callable[[], Awaitable[Whole | None]], reply: Reply, request_id: str) -> Whole | None:
    """What `once` gives; it is tried again where a worker or a Processor was lost and the client has got nothing.

    A request that is not streamed may so be repeated after its first token, which the Processor cannot know to be
    unseen. What several workers have been lost with before it gave a token is not tried on still others.
    """
    for attempt in range(1, CALL_ATTEMPTS + 1):
        try:
            return await once()
        except LOST as error:
            if reply.started or TRIED in error.details or attempt == CALL_ATTEMPTS:
                raise
            logger.info("request %s: nothing was sent yet, so it is asked again: %s", request_id, error)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def close(stream: ResponseStream, request_id: str) -> None:
    """Cancel what is under way behind a stream, and wait for that."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await stream.aclose()
    except TimeoutError:
        logger.error("request %s: its stream did not close within %g s", request_id, CLOSE_TIMEOUT_S)


class Generation:
    """One admitted request, from the call of the Processor to the last byte but the closing one."""

    def __init__(
        self,
        api: Api,
        client: EndpointClient,
        request: ParsedRequest,
        request_id: str,
        observer: RequestObserver,
        deps: HttpDeps,
    ) -> None:
        head = ResponseHead(request_id, request.model, int(deps.clock.wall_s()), request.include_usage)
        self._api, self._rich = api, api.rich
        self._head = head
        self._client = client
        self._request = request
        self._request_id = request_id
        self._observer, self._clock = observer, deps.clock
        self._timeout_s = deps.settings.request_timeout_s

    def _begin(self) -> None:
        """Nothing has come yet."""
        self._format = self._api.format(self._head)
        self._progress = GenerationProgress(self._observer, self._clock)

    async def run(self, reply: Reply) -> Whole | None:
        """As `ModelRoute.answer`. The Processor's stream is closed whatever happens, which cancels its work."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await until_answered(lambda: self._once(reply), reply, self._request_id)
        except TimeoutError as error:
            message = f"The request did not end within {self._timeout_s:g} s, this Frontend's `request_timeout_s`."
            raise DeadlineExceeded(message) from error

    async def _once(self, reply: Reply) -> Whole | None:
        self._begin()
        payload = {**self._request.payload, "request_id": self._request_id}
        stream = await call_processor(self._client, payload, self._request_id, self._timeout_s)
        try:
            if not self._request.stream:
                return Whole(200, await self._collect(stream))
            await self._stream(stream, reply)
            return None
        finally:
            await close(stream, self._request_id)

    async def _stream(self, stream: ResponseStream, reply: Reply) -> None:
        shape, progress = self._format, self._progress
        begun = False

        def take(batch: list[Any]) -> Awaitable[None] | None:
            nonlocal begun
            if progress.finish_reason is not None:
                return None
            texts = progress.take(batch)
            events = shape.texts(texts) if texts else b""
            if progress.finish_reason is not None:
                events += shape.last(progress.finish_reason, progress.usage)
            if not begun and (events or progress.has_tokens):
                begun = True
                events = shape.first() + events
            return reply.push(events) if events else None

        await self._pumped(stream, take)

    async def _collect(self, stream: ResponseStream) -> bytes:
        progress = self._progress
        texts: list[str] = []

        def take(batch: list[Any]) -> None:
            if progress.finish_reason is None:
                texts.extend(progress.take(batch))

        await self._pumped(stream, take)
        assert progress.finish_reason is not None
        return self._format.whole("".join(texts), progress.finish_reason, progress.usage)

    async def _pumped(self, stream: ResponseStream, take: Take) -> None:
        """All items, until the Processor ends by itself: closing a stream before its end cancels the handler behind it.

        It has `END_WAIT_S` for that once all is there.
        """
        progress, loop = self._progress, asyncio.get_running_loop()

        def taken(batch: list[Any]) -> Awaitable[None] | None:
            room = take(batch)
            if progress.finish_reason is not None and limit.when() is None:
                limit.reschedule(loop.time() + END_WAIT_S)
            return room

        try:
            async with asyncio.timeout(None) as limit:
                await pump(stream, taken)
        except (TimeoutError, DynamoError) as error:
            if progress.finish_reason is None:
                raise
            reason = "it lingered" if isinstance(error, TimeoutError) else str(error)
            logger.warning("request %s: complete, but its stream ended badly: %s", self._request_id, reason)
        if progress.finish_reason is None:
            raise _ended_early()

    async def _await_end(self, batches: AsyncIterator[list[Any]]) -> None:
        """Let the Processor end by itself: closing a stream before its end cancels the handler behind it."""
        try:
            async with asyncio.timeout(END_WAIT_S):
                async for _ in batches:
                    continue
        except (TimeoutError, DynamoError) as error:
            reason = "it lingered" if isinstance(error, TimeoutError) else str(error)
            logger.warning("request %s: complete, but its stream ended badly: %s", self._request_id, reason)


class RichGeneration(Generation):
    """The same of a request with extras: each item belongs to one of several choices."""

    async def _stream(self, stream: ResponseStream, reply: Reply) -> None:
        shape, progress = self._rich(self._head, self._request), self._progress
        gathered = Gathered()
        begun = False
        batches = stream.batches()
        async for batch in batches:
            progress.take_counts(batch)
            items = gathered.take(batch)
            events = b"" if not items else shape.events(items, gathered)
            if events and not begun:
                begun = True
                events = shape.first() + events
            if gathered.usage is not None:
                progress.end(gathered.usage)
                await reply.event((b"" if begun else shape.first()) + events + shape.last(gathered))
                await self._await_end(batches)
                return
            if events:
                await reply.event(events)
        raise _ended_early()

    async def _collect(self, stream: ResponseStream) -> bytes:
        gathered = Gathered()
        batches = stream.batches()
        async for batch in batches:
            self._progress.take_counts(batch)
            gathered.take(batch)
            if gathered.usage is not None:
                self._progress.end(gathered.usage)
                await self._await_end(batches)
                return self._rich(self._head, self._request).whole(gathered)
        raise _ended_early()


class GenerationProgress:
    """What has arrived of a response so far."""

    def __init__(self, observer: RequestObserver, clock: Clock) -> None:
        self._observer = observer
        self._now_s = reader(clock)
        self._tokens = 0
        self._prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether anything was produced: from then on the request cannot be repeated."""
        return self._tokens > 0

    def take(self, batch: Sequence[dict[str, Any]]) -> list[str]:
        """The texts of the items that arrived together.

        Raises `EngineError` or `RequestCancelled` for a response that the engine did not finish.
        """
        texts: list[str] = []
        tokens = 0
        for item in batch:
            if text := item.get("text"):
                texts.append(text)
            tokens += item.get("num_tokens", 0)
            if (prompt_tokens := item.get("prompt_tokens")) is not None:
                self._on_prompt(prompt_tokens)
            if (finish_reason := item.get("finish_reason")) is not None:
                self._on_finish(finish_reason, item.get("usage"))
        if tokens:
            self._tokens += tokens
            self._observer.on_tokens(tokens, self._now_s())
        return texts

    def take_counts(self, batch: Sequence[dict[str, Any]]) -> None:
        """Of several choices: the numbers alone. Raises as `take`."""
        for item in batch:
            if (prompt_tokens := item.get("prompt_tokens")) is not None:
                self._on_prompt(prompt_tokens)
            _check_finish(item.get("finish_reason"))
        if tokens := sum(item.get("num_tokens", 0) for item in batch):
            self._tokens += tokens
            self._observer.on_tokens(tokens, self._now_s())

    def end(self, usage: dict[str, Any]) -> None:
        """All choices are complete."""
        self._on_finish("stop", usage)

    def _on_prompt(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._observer.on_prompt(prompt_tokens)

    def _on_finish(self, finish_reason: str, usage: dict[str, Any] | None) -> None:
        _check_finish(finish_reason)
        self.finish_reason = finish_reason
        self.usage = usage
        if usage is None:
            return
        self._on_prompt(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        if (cached_tokens := details.get("cached_tokens")) is not None:
            self._observer.on_cached(cached_tokens)


def _check_finish(finish_reason: str | None) -> None:
    if finish_reason == "error":
        raise EngineError("The engine ended the request with an error; the worker's log has the reason.")
    if finish_reason == "abort":
        raise RequestCancelled("The worker aborted the request before it was complete; send it again.")


def _ended_early() -> WorkerLost:
    return WorkerLost("The response ended without a finish reason: a worker was lost; send the request again.")
