"""The application of a Frontend before HTTP servers: requests go on as they came, answers come back as they are.

While the client has got nothing of an answer, its request may be sent to another server (`components.dispatcher`).
With prefill servers it is handed over in two steps (`core.routing.disagg`). A failure there costs time, not the
request: the decode server then computes the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from starlette.types import Scope

from dynamo_local.clock import Clock
from dynamo_local.components.http_metrics import Endpoint, RequestObserver
from dynamo_local.components.limits import run_by_size
from dynamo_local.components.openai import errors as api_errors
from dynamo_local.components.openai.app import Application, make_app
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.route import HttpDeps, ModelRoute
from dynamo_local.components.proxy import messages as payloads
from dynamo_local.components.proxy.messages import Ask, HttpFrontendConfig
from dynamo_local.components.proxy.pool import ModelDispatchers
from dynamo_local.core.routing import disagg as kv_handover
from dynamo_local.errors import DeadlineExceeded, DynamoError, UpstreamError, WorkerLost
from dynamo_local.system import request_log, tracing

# --- Reports a proxied answer to the metrics: tokens as the server counts them, or one per event.

_DONE = b"data: [DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


class ProxyProgress:
    """The progress of one answer."""

    def __init__(self, observer: RequestObserver, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock
        self._line_ended = False

    def on_stream(self, data: bytes) -> None:
        """A piece of a stream. Each event counts as a token, because bodies are passed on without being parsed."""
        ends = ((b"\n" if self._line_ended else b"") + data).count(b"\n\n")
        self._line_ended = data.endswith(b"\n") and not data.endswith(b"\n\n")
        if _DONE in data:
            ends -= 1
        self._observer.on_tokens(ends, self._clock.now_s())

    def on_whole(self, body: bytes) -> None:
        """A whole answer: its `usage`, where it has one."""
        usage = _usage(body)
        if usage is None:
            return
        self._observer.on_prompt(usage.prompt_tokens)
        self._observer.on_tokens(usage.completion_tokens or 0, self._clock.now_s())
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self._observer.on_cached(details.cached_tokens)


def _usage(body: bytes) -> Any:
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):  # an answer of another shape has no usage
        return None


# --- The fields that a Frontend reads of a request that it forwards. The server checks all others. Pure.


@dataclass(frozen=True, slots=True)
class Path:
    """A route that is passed on. `handed_over`: it generates, so a prefill server may do its first half."""

    path: str
    endpoint: Endpoint
    handed_over: bool


PATHS = (
    Path("/v1/chat/completions", "chat_completions", True),
    Path("/v1/completions", "completions", True),
    Path("/v1/embeddings", "embeddings", False),
)

SENT_ON = ("authorization", "traceparent", "tracestate")
"""The client's headers that go on. Others are about its connection to us, or could bypass our routing."""

SENT_BACK = ("content-type", "retry-after", "www-authenticate", "openai-processing-ms")
"""The server's headers that go back to the client."""

_ERROR_EVENT = re.compile(rb'^data:\s*\{\s*("error"|"object"\s*:\s*"error")', re.MULTILINE)
_ROLE = re.compile(rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"assistant"')
_TEXT = re.compile(rb'"(content|reasoning|reasoning_content)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{')

_STREAM_BOUNDS = ("max_completion_tokens", "max_tokens")


class _BodyFields(msgspec.Struct):
    """Everything else in the body is not looked at, and these only as far as they are what they should be: a server's
    own error says it better."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()


_request_decoder = msgspec.json.Decoder(_BodyFields)
_model_decoder = msgspec.json.Decoder(Annotated[str, msgspec.Meta(min_length=1, max_length=512)])
_MOST_DIGITS = 10


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """`tokens` bounds what it may generate; None where it does not say. `headers` are those that go on."""

    model: str
    stream: bool
    tokens: int | None
    body: bytes
    headers: Mapping[str, str]

    def ask(self, path: Path, request_id: str, body: bytes | None = None) -> Ask:
        """For a server; with another body, for a step of a hand-over.

        vLLM names its request after the `x-request-id`: prefill and decode servers must get the same one, and no two
        requests at a time may share it. So it is our `request_id`, which begins with the client's.
        """
        headers = {**self.headers, "content-type": "application/json", request_log.HEADER: request_id}
        return Ask(path.path, self.body if body is None else body, headers, self.tokens)


def parse(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> ProxyRequest:
    """Raises `ApiError` 400 for what is no JSON object, or names no model."""
    try:
        fields = _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    bounds = [int(text) for name in _STREAM_BOUNDS if _is_count(text := bytes(getattr(fields, name)))]
    return ProxyRequest(
        model=_model(fields.model),
        stream=bytes(fields.stream) == b"true",
        tokens=bounds[0] if bounds else None,
        body=body,
        headers=pick_headers(((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers), SENT_ON),
    )


def _model(raw: msgspec.Raw) -> str:
    if bytes(raw) in (b"", b"null"):
        raise bad_param("model", "Missing required parameter: `model`.", "missing_required_parameter")
    try:
        return _model_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = "Invalid value for `model`: expected the name of a model."
        raise bad_param("model", message, "invalid_type") from error


def _is_count(text: bytes) -> bool:
    return len(text) <= _MOST_DIGITS and text.isdigit() and int(text) > 0


def pick_headers(headers: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, str]:
    """Those of these names, in lower case."""
    wanted = set(names)
    return {name.lower(): value for name, value in headers if name.lower() in wanted}


def prefill_body(request: ProxyRequest) -> bytes | str:
    """The body of a hand-over's first step; or, as text, why there is none."""
    try:
        content = _members(request.body)
    except _UNREADABLE as error:
        return f"its body cannot be read: {error}"
    if why := kv_handover.why_not({**content, "prompt": _judged_prompt(content.get("prompt"))}):
        return why
    return msgspec.json.encode(kv_handover.prefill_request(content))


def decode_body(request: ProxyRequest, prefilled: bytes) -> bytes | str:
    """The body of the second step, from the prefill server's answer; or, as text, why there is none."""
    try:
        params = kv_handover.params_of(msgspec.json.decode(prefilled))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"the prefill server's answer is no JSON: {error}"
    if params is None:
        return f"the prefill server's answer has no {kv_handover.PARAMS}: is its KV connector configured?"
    return msgspec.json.encode(kv_handover.decode_request(_members(request.body), params))


_SMALL_BYTES = 1024
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_one_prompt_decoders = tuple(msgspec.json.Decoder(kind) for kind in (str, list[int], tuple[str], tuple[list[int]]))


def _members(body: bytes) -> dict[str, Any]:
    """The body's members. Long ones stay as they are written, because they go on unread."""
    raw = _members_decoder.decode(body)
    small = {name: msgspec.json.decode(value) for name, value in raw.items() if len(bytes(value)) <= _SMALL_BYTES}
    return {**raw, **small}


def _judged_prompt(prompt: Any) -> Any:
    """A prompt as the rules of a hand-over need it: of one that is long, whether it is one prompt or several."""
    if not isinstance(prompt, msgspec.Raw):
        return prompt
    for decoder in _one_prompt_decoders:
        with contextlib.suppress(*_UNREADABLE):
            decoder.decode(prompt)
            return ""
    return [None, None]


def has_error_event(data: bytes) -> bool:
    """Whether one of these events of a stream is an error: vLLM reports so that it could not pull the KV."""
    return _ERROR_EVENT.search(data) is not None


def says_nothing(data: bytes) -> bool:
    """Whether this beginning of a stream is at most a chat's first event, which has a role and no text yet."""
    events = data.count(b"\n\n")
    return events == 0 or (events == 1 and _ROLE.search(data) is not None and _TEXT.search(data) is None)


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
        return parse(body, scope["headers"])

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
            answer = payloads.answer_of(error)
            if answer is None:
                raise
            logger.warning("request %s: %s", request_id, error)
            return answer


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
        message = self._request.ask(self._path, self._request_id, handed)
        incoming = UpstreamAnswer(self._reply, self._progress, checked=handed is not None)
        try:
            await dispatcher.pump(
                message.payload(),
                incoming.take,
                request_id=self._request_id,
                tokens=self._request.tokens or 0,
                timeout_s=self._left_s(),
                # KV can be pulled only once: a server that failed after its pull leaves none for another.
                max_tries=None if handed is None else 1,
            )
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
        body = await run_by_size(len(self._request.body), prefill_body, self._request)
        if isinstance(body, str):
            logger.info("request %s is prefilled where it is decoded: %s", self._request_id, body)
            return None
        message = self._request.ask(self._path, self._request_id, body)
        incoming = UpstreamAnswer(None, None, checked=False)
        timeout_s = min(self._left_s(), self._deps.options.prefill_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                with tracing.span("prefill"):
                    await dispatcher.pump(
                        message.payload(),
                        incoming.take,
                        request_id=self._request_id,
                        tokens=1,
                        timeout_s=timeout_s,
                        new_worker_s=0.0,  # the decode server can prefill now
                    )
            answer = await incoming.whole()
        except (DynamoError, TimeoutError) as error:
            why = str(error) or f"no prefill server did it within {timeout_s:g} s"
            logger.warning("request %s is prefilled where it is decoded: %s", self._request_id, why)
            return None
        return await self._with_params(answer)

    async def _with_params(self, answer: Whole | None) -> bytes | None:
        """The decode server's body, from the prefill server's answer."""
        if answer is None or answer.status != 200:
            answered = "a stream" if answer is None else answer.status
            logger.warning("request %s is prefilled where it is decoded: a prefill server answered %s",
                           self._request_id, answered)  # fmt: skip
            return None
        body = await run_by_size(len(self._request.body), decode_body, self._request, answer.body)
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

    def take(self, batch: list[Any]) -> Awaitable[None] | None:
        """The items that arrived together."""
        events: list[bytes] = []
        for item in batch:
            if isinstance(item, bytes):
                events.append(item)
            elif isinstance(item, dict) and "part" in item:
                self._parts.append(item["part"])
            elif isinstance(item, dict):
                self._head, self._parts = payloads.parse_head(item), []
        return self._stream(b"".join(events)) if events else None

    def _stream(self, data: bytes) -> Awaitable[None] | None:
        if self._held is not None:
            data = self._held + data
            if has_error_event(data):
                raise HandOverFailed("the decode server cannot go on from what was prefilled; its log has the reason")
            if says_nothing(data):
                self._held = data
                return None
            self._held = None
        return self._give(data)

    def _give(self, data: bytes) -> Awaitable[None] | None:
        if self._reply is None:
            raise UpstreamError("the server streams what it was asked to answer at once")
        self.streamed = True
        if self._progress is not None:
            self._progress.on_stream(data)
        return self._reply.push(data)

    async def whole(self) -> Whole | None:
        """The answer; None where it was streamed. Raises `WorkerLost` where none came."""
        if self._held and (until_free := self._give(self._held)) is not None:
            await until_free
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
