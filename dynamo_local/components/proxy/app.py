"""The application of a Frontend before HTTP servers: requests go on as they came, answers come back as they are.

While the client has got nothing of an answer, its request may be sent to another server
(`components.routing.dispatch`); with prefill servers it is handed over in two steps (`core.kv.handover`), and whatever
goes wrong there costs time, not the request: it is prefilled where it is decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from starlette.types import Scope

from dynamo_local.components.http_metrics import RequestObserver
from dynamo_local.components.large_requests import run_by_size
from dynamo_local.components.openai import errors as api_errors
from dynamo_local.components.openai.app import Application, make_app
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.route import HttpDeps, ModelRoute
from dynamo_local.components.proxy import payloads, requests
from dynamo_local.components.proxy.pool import ModelDispatchers
from dynamo_local.components.proxy.progress import ProxyProgress
from dynamo_local.components.proxy.requests import PATHS, Path, ProxyRequest
from dynamo_local.components.proxy.settings import HttpFrontendConfig
from dynamo_local.errors import DeadlineExceeded, DynamoError, UpstreamError, WorkerLost

logger = logging.getLogger(__name__)

BAD_REQUEST = 400
"""HTTP statuses from this on are errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyDeps(HttpDeps):
    """All that the application works with; a test gives fakes. `servers` decode (or do everything)."""

    servers: ModelDispatchers
    prefill: ModelDispatchers
    options: HttpFrontendConfig = field(default_factory=HttpFrontendConfig)


def create_app(deps: ProxyDeps) -> Application:
    """The application. It needs no infrastructure beyond what `deps` holds, and starts nothing."""
    return make_app(deps, {path.path: ProxyRoute(path, deps) for path in PATHS})


class HandOverFailed(Exception):
    """The decode server could not use what was prefilled elsewhere; the client has got nothing."""


class ProxyRoute(ModelRoute[ProxyRequest]):
    """One path that is passed on."""

    def __init__(self, path: Path, deps: ProxyDeps) -> None:
        super().__init__(path.endpoint, deps)
        self._path = path
        self._proxy = deps

    def parse(self, body: bytes, scope: Scope) -> ProxyRequest:
        return requests.parse(body, scope["headers"])

    async def answer(
        self, request: ProxyRequest, request_id: str, observer: RequestObserver, reply: Reply
    ) -> Whole | None:
        timeout_s = self._proxy.settings.request_timeout_s
        passing = ProxiedRequest(self._proxy, self._path, request, request_id, observer, reply)
        try:
            async with asyncio.timeout(timeout_s):
                return await passing.run()
        except TimeoutError as error:
            message = f"The request did not end within {timeout_s:g} s, this Frontend's `request_timeout_s`."
            raise DeadlineExceeded(message) from error
        except DynamoError as error:
            told = payloads.answer_of(error)
            if told is None:
                raise
            logger.warning("request %s: %s", request_id, error)
            return told


class ProxiedRequest:
    """One admitted request, on its way to a server and back."""

    def __init__(
        self,
        deps: ProxyDeps,
        path: Path,
        request: ProxyRequest,
        request_id: str,
        observer: RequestObserver,
        reply: Reply,
    ) -> None:
        self._deps = deps
        self._path = path
        self._request = request
        self._request_id = request_id
        self._progress = ProxyProgress(observer, deps.clock)
        self._reply = reply
        self._deadline_s = deps.clock.now_s() + deps.settings.request_timeout_s

    async def run(self) -> Whole | None:
        """As `ModelRoute.answer`."""
        handed = await self._prefilled()
        if handed is not None:
            try:
                return await self._pass(handed)
            except HandOverFailed as error:
                logger.warning("request %s is prefilled where it is decoded: %s", self._request_id, error)
        return await self._pass(None)

    async def _pass(self, handed: bytes | None) -> Whole | None:
        """Send the request and return the answer. With a body that was `handed` over, `HandOverFailed` is raised if a
        server fails before the client has got anything."""
        dispatcher = await self._deps.servers.dispatcher(self._request.model)
        if dispatcher is None:
            raise api_errors.model_unavailable(self._request.model)
        asked = self._request.ask(self._path, self._request_id, handed)
        batches = dispatcher.send(
            asked.payload(),
            request_id=self._request_id,
            tokens=self._request.tokens or 0,
            timeout_s=self._left_s(),
            # KV can be pulled only once: a server that failed after its pull leaves none for another.
            max_tries=None if handed is None else 1,
        )
        incoming = UpstreamAnswer(self._reply, self._progress, checked=handed is not None)
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    await incoming.take(batch)
        except DynamoError as error:
            if handed is None or incoming.streamed or not error.retryable:
                raise
            raise HandOverFailed(str(error)) from error
        return await incoming.whole()

    # --- the first step of a hand-over -----------------------------------------------------------

    async def _prefilled(self) -> bytes | None:
        """The body for the decode server after a prefill elsewhere; None: it prefills itself. Raises nothing of its
        own."""
        if not self._path.handed_over:
            return None
        dispatcher = await self._deps.prefill.dispatcher(self._request.model)
        if dispatcher is None:
            return None
        body = await run_by_size(len(self._request.body), requests.prefill_body, self._request)
        if isinstance(body, str):
            logger.info("request %s is prefilled where it is decoded: %s", self._request_id, body)
            return None
        asked = self._request.ask(self._path, self._request_id, body)
        incoming = UpstreamAnswer(None, None, checked=False)
        timeout_s = min(self._left_s(), self._deps.options.prefill_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                batches = dispatcher.send(asked.payload(), request_id=self._request_id, tokens=1, timeout_s=timeout_s)
                async with contextlib.aclosing(batches):
                    async for batch in batches:
                        await incoming.take(batch)
            answer = await incoming.whole()
        except (DynamoError, TimeoutError) as error:
            why = str(error) or f"no prefill server did it within {timeout_s:g} s"
            logger.warning("request %s is prefilled where it is decoded: %s", self._request_id, why)
            return None
        return await self._with_params(answer)

    async def _with_params(self, answer: Whole | None) -> bytes | None:
        """The decode server's body, from the prefill server's answer."""
        if answer is None or answer.status != 200:
            told = "a stream" if answer is None else answer.status
            logger.warning("request %s is prefilled where it is decoded: a prefill server answered %s",
                           self._request_id, told)  # fmt: skip
            return None
        body = await run_by_size(len(self._request.body), requests.decode_body, self._request, answer.body)
        if isinstance(body, str):
            logger.warning("request %s is prefilled where it is decoded: %s", self._request_id, body)
            return None
        return body

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._deps.clock.now_s())


class UpstreamAnswer:
    """An answer as it comes from a server: streams go on at once, the others are kept until they are whole.

    Without a `reply` a stream is an error. `checked`: an error instead of an answer, in a stream or whole, raises
    `HandOverFailed`; also 400, which vLLM gives for KV of an engine that does not fit.
    """

    def __init__(self, reply: Reply | None, progress: ProxyProgress | None, *, checked: bool) -> None:
        self._reply = reply
        self._progress = progress
        self._held: bytes | None = b"" if checked else None
        self._head: payloads.Head | None = None
        self._parts: list[bytes] = []
        self.streamed = False
        """The client has got a part of it."""

    async def take(self, batch: list[object]) -> None:
        """Handle the items that arrived together."""
        events: list[bytes] = []
        for item in batch:
            if isinstance(item, bytes):
                events.append(item)
            elif isinstance(item, dict) and "part" in item:
                self._parts.append(item["part"])
            elif isinstance(item, dict):
                self._head, self._parts = payloads.parse_head(item), []
        if events:
            await self._stream(b"".join(events))

    async def _stream(self, data: bytes) -> None:
        if self._held is not None:
            data = self._held + data
            if requests.has_error_event(data):
                raise HandOverFailed("the decode server cannot go on from what was prefilled; its log has the reason")
            if requests.says_nothing(data):
                self._held = data
                return
            self._held = None
        await self._give(data)

    async def _give(self, data: bytes) -> None:
        if self._reply is None:
            raise UpstreamError("the server streams what it was asked to answer at once")
        self.streamed = True
        if self._progress is not None:
            self._progress.on_stream(data)
        await self._reply.event(data)

    async def whole(self) -> Whole | None:
        """The answer; None where it was streamed. Raises `WorkerLost` where none came."""
        if self._held:
            await self._give(self._held)
        if self.streamed:
            return None
        if self._head is None:
            raise WorkerLost("the worker ended its answer before it had begun; send the request again")
        body, refused = b"".join(self._parts), self._head.status >= BAD_REQUEST
        if self._held is not None and refused:
            raise HandOverFailed(f"the decode server answered {self._head.status}: {body[:200]!r}")
        if self._progress is not None and not refused:
            self._progress.on_whole(body)
        return Whole(self._head.status, body, self._head.headers)
