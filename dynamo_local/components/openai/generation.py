"""In the Frontend: an HTTP request becomes a call of the Processor, and its items become the answer.

The way of a completion, in the order in which it goes (the process of each step in brackets):

1. [Frontend] `ModelRoute.__call__` reads the body, parses it and admits the request (`route`, `requests`).
2. [Frontend] `Generation.run` calls the Processor and pumps its answer. It owns the retries over Processors.
3. [Processor] `Pipeline.pump` renders the chat template, tokenises, and makes a generate request.
4. [Processor] `Dispatcher.pump` chooses a worker: the Router is asked first (`kv_router`, its own process), else the
   picker decides (`core.routing`). It owns the retries over workers, also of an answer whose worker was lost.
5. [VllmWorker] `DecodeService.generate` refuses when it is full, and decides where to prefill (`RemotePrefill`).
6. [PrefillWorker] A remote prefill comes through the queue; `Prefiller` answers with the identity of the KV.
7. [VllmWorker] The engine decodes, and each batch of tokens becomes one frame (`transport.requests.responses`).
8. [Processor] `Answer.take` turns tokens into text in the callback in which a frame arrives.
9. [Frontend] `GenerationAnswer.take` turns items into server-sent events, and `Reply.push` writes them at once.

The status line of a stream waits for the first real item (text, a token or the end). The Processor sends the prompt's
length before a worker takes the request, and a worker that is full must still be able to become a 429.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.types import Scope

from dynamo_local.clock import Clock, reader
from dynamo_local.components.dispatcher import LOST, TRIED
from dynamo_local.components.http_metrics import Endpoint, RequestObserver
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.recorder import BLOCK_TOKENS
from dynamo_local.components.openai.requests import ParsedRequest, Parser, parse_chat, parse_completion
from dynamo_local.components.openai.responses import ChatFormat, CompletionFormat, ResponseFormat, ResponseHead
from dynamo_local.components.openai.route import HttpDeps, ModelRoute
from dynamo_local.components.sim_api.formats import RichChat, RichCompletion, RichFormat
from dynamo_local.components.sim_api.other_apis import (
    MessagesFormat,
    ResponsesFormat,
    parse_messages,
    parse_responses,
)
from dynamo_local.core.traffic import Phases
from dynamo_local.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineError,
    KillsWorkers,
    KvTransferError,
    RequestCancelled,
    StreamGap,
    WorkerDraining,
    WorkerLost,
)
from dynamo_local.ports import EndpointClient, ResponseStream
from dynamo_local.system import tracing
from dynamo_local.transport.requests.stream import Take, pump

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Processors that one request may ask, and thus answers that it may begin, while the client has got nothing."""

REPEATABLE = (WorkerLost, WorkerDraining, StreamGap, KvTransferError)
"""The computed part is gone or was never begun, and another process can compute it."""

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
    """The differences between the routes."""

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
        return await Generation(self._api, self._client, request, request_id, observer, self._deps).run(reply)


async def until_answered(
    once: Callable[[int], Awaitable[Whole | None]], reply: Reply, observer: RequestObserver, request_id: str
) -> Whole | None:
    """The result of `once`. It is tried again if a worker or a Processor was lost and the client has got nothing.

    So a request that is not streamed may be repeated after its first token. The Processor cannot know that nobody
    has seen it. If several workers failed before their first token, the Dispatcher has tried enough of them. `once`
    gets how many workers were lost with the request (`LOST`), which `observer` counts.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            return await once(observer.lost)
        except DynamoError as error:
            observer.lost = error.details.get(LOST, observer.lost)
            tried = attempts == MAX_ATTEMPTS or TRIED in error.details or isinstance(error, KillsWorkers)
            if tried or reply.has_content or not isinstance(error, REPEATABLE):
                raise
            logger.info("request %s: nothing was sent yet, so it is asked again: %s", request_id, error)
            observer.begins_anew()


async def close(stream: ResponseStream, request_id: str) -> None:
    """Cancel what is under way behind a stream, and wait for that."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await stream.aclose()
    except TimeoutError:
        logger.error("request %s: its stream did not close within %g s", request_id, CLOSE_TIMEOUT_S)


def migrations_header(observer: RequestObserver) -> dict[str, str]:
    """Tells the client of a whole answer that it went on at another worker. A stream's head is sent before that."""
    return {"x-dynamo-migrations": str(observer.migrations)} if observer.migrations else {}


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
        self._head = ResponseHead(request_id, request.model, int(deps.clock.wall_s()), request.include_usage)
        self._api = api
        self._client = client
        self._request = request
        self._request_id = request_id
        self._observer, self._clock = observer, deps.clock
        self._timeout_s = deps.settings.request_timeout_s
        self._traced = {} if deps.recorder is None else {"trace_block_size": BLOCK_TOKENS}

    async def run(self, reply: Reply) -> Whole | None:
        """As `ModelRoute.answer`. The Processor's stream is closed whatever happens, which cancels its work."""
        try:
            async with asyncio.timeout(self._timeout_s):
                once = partial(self._once, reply)
                return await until_answered(once, reply, self._observer, self._request_id)
        except TimeoutError as error:
            message = f"The request did not end within {self._timeout_s:g} s, this Frontend's `request_timeout_s`."
            raise DeadlineExceeded(message) from error

    def _answer(self) -> GenerationAnswer:
        progress = GenerationProgress(self._observer, self._clock)
        if "extras" in self._request.payload:
            return RichAnswer(progress, self._api.rich(self._head, self._request))
        return PlainAnswer(progress, self._api.format(self._head))

    async def _once(self, reply: Reply, lost: int) -> Whole | None:
        payload = {**self._request.payload, "request_id": self._request_id, **self._traced}
        if lost:
            payload[LOST] = lost
        stream = await self._client.call(payload, request_id=self._request_id, timeout_s=self._timeout_s)
        answer = self._answer()

        def taken(batch: list[Any]) -> Awaitable[None] | None:
            events = answer.take(batch)
            return reply.push(events) if events else None

        def kept(batch: list[Any]) -> None:
            answer.keep(batch)

        try:
            await self._pumped(stream, taken if self._request.stream else kept, answer.progress)
            tracing.note(lambda: {"gen_ai.response.finish_reasons": answer.finish_reasons()})
            return None if self._request.stream else Whole(200, answer.whole(), migrations_header(self._observer))
        finally:
            await close(stream, self._request_id)

    async def _pumped(self, stream: ResponseStream, take: Take, progress: GenerationProgress) -> None:
        """All items, until the Processor ends by itself: closing a stream before its end cancels the handler behind it.

        It has `END_WAIT_S` for that once all is there.
        """
        loop = asyncio.get_running_loop()

        def taken(batch: list[Any]) -> Awaitable[None] | None:
            if progress.finish_reason is not None:
                return None
            until_free = take(batch)
            if progress.finish_reason is not None:
                limit.reschedule(loop.time() + END_WAIT_S)
            return until_free

        try:
            async with asyncio.timeout(None) as limit:
                await pump(stream, taken)
        except (TimeoutError, DynamoError) as error:
            if progress.finish_reason is None:
                raise
            reason = "it lingered" if isinstance(error, TimeoutError) else str(error)
            logger.warning("request %s: complete, but its stream ended badly: %s", self._request_id, reason)
        if progress.finish_reason is None:
            raise WorkerLost("The response ended without a finish reason: a worker was lost; send the request again.")


class GenerationAnswer(Protocol):
    """A response as it grows: items in, bytes for the client out."""

    progress: GenerationProgress

    def finish_reasons(self) -> list[str]:
        """One for each choice that has ended."""
        ...

    def take(self, batch: list[Any]) -> bytes:
        """The events of these items, with the stream's beginning and end."""
        ...

    def keep(self, batch: list[Any]) -> None:
        """Notes the items of a response that is not streamed."""
        ...

    def whole(self) -> bytes:
        """The body of a response that is not streamed."""
        ...


class PlainAnswer:
    """One choice without extras: the fast way."""

    def __init__(self, progress: GenerationProgress, shape: ResponseFormat) -> None:
        self.progress = progress
        self._shape = shape
        self._texts: list[str] = []
        self._begun = False

    def finish_reasons(self) -> list[str]:
        reason = self.progress.finish_reason
        return [] if reason is None else [reason]

    def take(self, batch: list[Any]) -> bytes:
        progress, shape = self.progress, self._shape
        texts = progress.take(batch)
        events = shape.texts(texts) if texts else b""
        if progress.finish_reason is not None:
            events += shape.last(progress.finish_reason, progress.usage)
        if not self._begun and (events or progress.has_tokens):
            self._begun = True
            events = shape.first() + events
        return events

    def keep(self, batch: list[Any]) -> None:
        self._texts += self.progress.take(batch)

    def whole(self) -> bytes:
        assert self.progress.finish_reason is not None
        return self._shape.whole("".join(self._texts), self.progress.finish_reason, self.progress.usage)


class RichAnswer:
    """A request with extras: each item belongs to one of several choices."""

    def __init__(self, progress: GenerationProgress, shape: RichFormat) -> None:
        self.progress = progress
        self._shape = shape
        self._begun = False

    def finish_reasons(self) -> list[str]:
        choices = self._shape.choices.values()
        return [choice.finish_reason for choice in choices if choice.finish_reason is not None]

    def keep(self, batch: list[Any]) -> None:
        self._note(batch)

    def _note(self, batch: list[Any]) -> list[Any]:
        self.progress.take_counts(batch)
        items = self._shape.note(batch)
        if self._shape.usage is not None:
            self.progress.end(self._shape.usage)
        return items

    def take(self, batch: list[Any]) -> bytes:
        items, shape = self._note(batch), self._shape
        ended = shape.usage is not None
        first = b""
        if not self._begun and (items or ended):
            self._begun = True
            first = shape.first()
        return first + shape.events(items) + (shape.last() if ended else b"")

    def whole(self) -> bytes:
        return self._shape.whole()


class GenerationProgress:
    """The part of a response that has arrived."""

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
            if (phases := item.get("phases")) is not None:
                self._observer.on_phases(Phases(*phases))
            if (prompt_tokens := item.get("prompt_tokens")) is not None:
                self._on_prompt(prompt_tokens)
                self._observer.on_placed(item.get("routed_s"))
                if (hit_rate := item.get("kv_hit_rate")) is not None:
                    self._observer.on_routed(hit_rate)
            if (migrations := item.get("migrations")) is not None:
                self._observer.on_migrated(migrations)
            if (finish_reason := item.get("finish_reason")) is not None:
                self._on_finish(finish_reason, item.get("usage"))
                if (trace := item.get("trace")) is not None:
                    self._observer.on_trace(trace)
                if (worker := item.get("worker")) is not None:
                    self._observer.on_worker(worker)
        if tokens:
            self._tokens += tokens
            self._observer.on_tokens(tokens, self._now_s())
        return texts

    def take_counts(self, batch: Sequence[dict[str, Any]]) -> None:
        """Takes the numbers alone, for several choices. Raises as `take`."""
        for item in batch:
            if (phases := item.get("phases")) is not None:
                self._observer.on_phases(Phases(*phases))
            if (prompt_tokens := item.get("prompt_tokens")) is not None:
                self._on_prompt(prompt_tokens)
                if (hit_rate := item.get("kv_hit_rate")) is not None:
                    self._observer.on_routed(hit_rate)
            if (migrations := item.get("migrations")) is not None:
                self._observer.on_migrated(migrations)
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
