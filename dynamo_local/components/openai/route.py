"""An HTTP exchange that asks for a model, from the client's body to the last byte of the answer. Subclasses answer it:
by a Processor (`openai.generation`), or by an HTTP server (`components.proxy`).

An error after the first event of a stream is one event `data: {"error": {…}}`, then the stream ends without
`data: [DONE]`: a client that has seen no `[DONE]` has not seen everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import request_spans as spans
from dynamo_local.components.http_metrics import Endpoint, HttpMetrics, RequestObserver, RequestType, Status
from dynamo_local.components.limits import run_by_size
from dynamo_local.components.models_view import Availability, ModelsView
from dynamo_local.components.openai import errors as api_errors
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.held import HeldRequests, no_worker
from dynamo_local.components.openai.http_io import (
    SEND_TIMEOUT_S,
    ClientGone,
    Connection,
    Reply,
    Whole,
    connection_of,
    read_body,
    require_json,
    until_disconnect,
)
from dynamo_local.components.openai.recorder import PageFeed, Recorder
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.core.types import Load
from dynamo_local.errors import DynamoError
from dynamo_local.system import tracing
from dynamo_local.system.key_files import ApiKeys
from dynamo_local.system.request_log import fit_for_logs, x_request_id
from dynamo_local.system.unread import LOOK_EVERY_S, is_abandoned

# --- Where a burst of requests waits: a request that has begun is passed on before another begins.
#
# Hundreds of clients may ask at the same moment. If all of them were read, tokenised and sent to workers at once, the
# first would get its first token as late as the last. No running stream would get a token meanwhile.

AT_ONCE: Final = 8
"""Requests that are begun in one pass of the event loop: some six milliseconds. With fewer, tokens travel in smaller
frames, which costs more than it gains."""


class Entrance:
    """Lets `AT_ONCE` requests in at each pass of the loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._let_in = 0

    async def enter(self) -> None:
        """Returns when the request may be begun: at once, where few others came in this pass of the loop."""
        if self._let_in < AT_ONCE:
            self._one_more()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _one_more(self) -> None:
        if self._let_in == 0:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._let_in += 1

    def _next_pass(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._one_more()


logger = logging.getLogger(__name__)

BODIES_AT_ONCE = 32
"""So many of the largest bodies may be in the house together, or more smaller ones; beyond it 429."""


class Activity:
    """How many requests this Frontend has: for the limit, and for a drain to wait for."""

    def __init__(self) -> None:
        self._open: dict[str, Connection | None] = {}
        self.abandoned = 0
        self._admitted = 0
        self._body_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open(self) -> int:
        """Exchanges of generating requests, those still sending their body included."""
        return len(self._open)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the open exchanges, in no order; the workers know the requests by the same ids."""
        return tuple(self._open)

    @property
    def admitted(self) -> int:
        """Requests that are being served."""
        return self._admitted

    def unread_s(self) -> tuple[float, ...]:
        """For how long each client that takes nothing of its answer has done so."""
        found = (each.unread_s() for each in self._open.values() if each is not None)
        return tuple(seconds for seconds in found if seconds is not None)

    async def end_unread(self, bound_s: float) -> None:
        """For ever: end the answers of which the client has taken no byte for `bound_s` since this was called."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, bound_s))
            for request_id, connection in list(self._open.items()):
                unread_s = None if connection is None else connection.unread_s()
                if connection is not None and is_abandoned(unread_s, loop.time() - began_s, bound_s):
                    self.abandoned += 1
                    logger.warning("request %s: ended, as its client has read nothing for %.0f s", request_id, unread_s)
                    connection.cut()

    @contextmanager
    def exchange(self, request_id: str, connection: Connection | None = None) -> Iterator[None]:
        """While this is open, the Frontend has the request of that id, and its client waits on the connection."""
        self._open[request_id] = connection
        self._idle.clear()
        try:
            yield
        finally:
            del self._open[request_id]
            if not self._open:
                self._idle.set()

    @contextmanager
    def body(self, most_bytes: int) -> Iterator[Callable[[int], None]]:
        """While this is open, what is taken of a body counts; the function raises `ApiError` 429 where all bodies that
        are in the house would come to more than `most_bytes`."""
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if self._body_bytes + size > most_bytes:
                raise api_errors.too_many_bytes(most_bytes)
            held += size
            self._body_bytes += size

        try:
            yield take
        finally:
            self._body_bytes -= held

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While this is open, one more request counts towards the limit."""
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    async def wait_idle(self) -> None:
        """Returns when no exchange is open. Each of them ends by its own deadline (`request_timeout_s`)."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpDeps:
    """The dependencies of an application that serves models. A test gives fakes. Without `keys` everybody may ask.
    While `draining` is set requests are refused. `page` makes /metrics if it also reports other processes.
    `adapters` are listed beside the models that they adapt."""

    models: ModelsView
    adapters: ModelsView | None = None
    settings: FrontendConfig = field(default_factory=FrontendConfig)
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    keys: ApiKeys | None = None
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    page: Callable[[], Awaitable[bytes]] | None = None
    activity: Activity = field(default_factory=Activity)
    entrance: Entrance = field(default_factory=Entrance)
    clock: Clock = field(default_factory=AsyncioClock)
    recorder: Recorder | None = None
    """Where requests are recorded; None: nowhere."""
    page_feed: PageFeed | None = None
    held: HeldRequests | None = None
    """Requests for models that share the GPUs; None: no model does."""

    def load(self) -> Load:
        """HTTP requests: `num_requests_waiting` have no token yet, `request_active_slots` are the other ones
        here."""
        waiting = self.metrics.queued
        return Load(
            request_active_slots=max(0, self.activity.open - waiting),
            request_total_slots=self.settings.max_inflight,
            num_requests_waiting=waiting,
        )


class Asked(Protocol):
    """The part of a request that every route needs."""

    @property
    def model(self) -> str:
        """The model's name, as the client gave it."""
        ...

    @property
    def stream(self) -> bool:
        """Whether the answer comes piece by piece."""
        ...


R = TypeVar("R", bound=Asked)


class ModelRoute(ABC, Generic[R]):
    """The ASGI application of one route."""

    def __init__(self, endpoint: Endpoint, deps: HttpDeps) -> None:
        self._endpoint = endpoint
        self._deps = deps

    def check_kind(self, scope: Scope) -> None:
        """Raises `ApiError` 415 for a body of another kind than this route takes."""
        require_json(scope)

    @abstractmethod
    def parse(self, body: bytes, scope: Scope) -> R:
        """The request. Raises `ApiError` for an invalid one."""

    @abstractmethod
    async def answer(self, request: R, request_id: str, observer: RequestObserver, reply: Reply) -> Whole | None:
        """The whole answer; or None after all events of a stream were written to `reply`.

        Raises `ApiError` or a `DynamoError`; when cancelled, it cancels its calls to others.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, connection_of(scope))
        # A client may send the same id twice at once, and what is inside needs one of its own. An engine names its
        # request after ours, so its log has the client's id, too.
        request_id = f"{x_request_id()}-{secrets.token_hex(4)}"
        span = tracing.server_span(
            spans.name_of(scope), scope["headers"], lambda: spans.received(scope, self._endpoint, request_id)
        )
        with span, self._deps.activity.exchange(request_id, connection_of(scope)):
            try:
                with self._deps.activity.body(BODIES_AT_ONCE * self._deps.settings.max_body_bytes) as take:
                    await self._serve(scope, receive, reply, request_id, take)
            except ClientGone:
                logger.info("request %s: the client went away; cancelled", request_id)
            except Exception as error:
                await self._fail(error, request_id, reply, scope["path"])

    async def _fail(self, error: Exception, request_id: str, reply: Reply, path: str) -> None:
        """Answer with the error. The place that caught it must not: it knows the frames up to there. One of them
        holds the request's body, which would then be freed only by the garbage collector."""
        if not isinstance(error, ApiError | DynamoError):
            logger.error("request %s failed unexpectedly", request_id, exc_info=error)
        answer = api_errors.from_error(error)
        tracing.note(lambda: spans.responded(200 if reply.started else answer.status))
        if reply.started or answer.status >= spans.SERVER_ERROR:
            tracing.current().failed(answer.code or type(error).__name__)
        log = logger.warning if answer.status >= 500 else logger.info
        log("request %s: %d %s: %s", request_id, answer.status, answer.code, fit_for_logs(answer.message))
        try:
            await reply.fail(answer, path)
        except TimeoutError:
            logger.info("request %s: its client does not read; cut off", request_id)
            reply.cut()

    async def _serve(
        self, scope: Scope, receive: Receive, reply: Reply, request_id: str, take: Callable[[int], None]
    ) -> None:
        deps = self._deps
        started_s = deps.clock.now_s()
        await deps.entrance.enter()
        request, size = await self._accept(scope, receive, take)
        observer = deps.metrics.begin(request.model, self._endpoint, _request_type(request), started_s)
        tracing.note(lambda: spans.asked(request.model, request.stream, getattr(request, "payload", {})))
        status: Status = "error"
        try:
            work = self._answered(request, (size, started_s), request_id, observer, reply)
            answer = await until_disconnect(work, receive, connection_of(scope))
            if answer is None or answer.status < 400:
                status = "success"
        except ClientGone:
            deps.metrics.disconnected_clients.inc()
            observer.gone()
            raise
        finally:
            # Counted and logged before the answer's last byte: a client that has the answer finds it in the metrics.
            ended_s = deps.clock.now_s()
            observer.end(status, ended_s)
            if deps.recorder is not None:
                deps.recorder.ended(request_id, status, ended_s - started_s, observer.ended_request())
            if deps.page_feed is not None and deps.page_feed.is_heard():
                deps.page_feed.ended(request_id, status, ended_s - started_s, observer.ended_request())
            tracing.note(lambda: spans.answered(observer.ended_request(), stream=request.stream))
            logger.info("request %s: %s after %.0f ms", request_id, status, (ended_s - started_s) * 1e3)
        tracing.note(lambda: spans.responded(200 if answer is None else answer.status))
        try:
            left_s = started_s + deps.settings.request_timeout_s - ended_s
            await reply.finish(answer, max(SEND_TIMEOUT_S, left_s))
        except TimeoutError:
            reply.cut()
            raise ClientGone from None  # it has stopped reading, and would hold a drain up for ever

    async def _answered(
        self, request: R, came: tuple[int, float], request_id: str, observer: RequestObserver, reply: Reply
    ) -> Whole | None:
        """As `answer`. Where its model shares the GPUs, the request is held until there is a worker.

        `came`: the bytes of its body, and when it came.
        """
        deps, again = self._deps, False
        size, since_s = came
        model = None if deps.held is None else deps.held.model_of(request.model)
        while True:
            if deps.held is not None and model is not None:
                await deps.held.until_served(model, size, since_s, reply if request.stream else None, again=again)
                await deps.entrance.enter()
            lost = observer.lost
            try:
                with deps.activity.serving():
                    return await self.answer(request, request_id, observer, reply)
            except (ApiError, DynamoError) as error:
                if model is None or reply.has_content or not no_worker(error):
                    raise
                again = True
                if observer.lost > lost:  # a worker had it until then, so it is held from now on
                    since_s = deps.clock.now_s()

    async def _accept(self, scope: Scope, receive: Receive, take: Callable[[int], None]) -> tuple[R, int]:
        """The request and its bytes. Raises `ApiError` for one that is not to be served, and counts it."""
        deps = self._deps
        request: R | None = None
        try:
            self.check_kind(scope)
            body = await read_body(scope, receive, deps.settings.max_body_bytes, take)
            if deps.draining.is_set():
                raise api_errors.draining()
            request = await run_by_size(len(body), self.parse, body, scope)
            if deps.models.availability(request.model) is not Availability.READY and not self._is_held(request.model):
                raise api_errors.no_model(deps.models, request.model)
            if deps.activity.admitted >= deps.settings.max_inflight:
                raise api_errors.too_many_requests(deps.settings.max_inflight)
        except ApiError:
            self._count_refused(request)
            raise
        return request, len(body)

    def _is_held(self, model: str) -> bool:
        held = self._deps.held
        return held is not None and held.model_of(model) is not None

    def _count_refused(self, request: R | None) -> None:
        model: str | None = None
        if request is not None and self._deps.models.availability(request.model) is not Availability.UNKNOWN:
            model = request.model
        self._deps.metrics.refused(model, self._endpoint, "unary" if request is None else _request_type(request))


def _request_type(request: Asked) -> RequestType:
    return "stream" if request.stream else "unary"
