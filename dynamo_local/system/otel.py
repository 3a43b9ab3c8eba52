"""OpenTelemetry's SDK behind `system.tracing`: spans, and their delivery by OTLP.

The SDK's own batch processor is not used. It drops a batch after one failure, logs each, waits 30 s at its end, and
starts a thread in each forked child: the arbiter forks its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, Literal

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk import environment_variables as names
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from dynamo_local import __version__
from dynamo_local.core.secrets import mask_text
from dynamo_local.errors import ConfigError
from dynamo_local.system.spans import ENDPOINTS, NO_SPAN, NO_STAGES, Attributes, Kind, Span, Stages

log = logging.getLogger("dynamo_local.traces")
_EXPORTERS: Final = logging.getLogger("opentelemetry.exporter")

RETRY_S: Final = 1.0
KEEP_S: Final = 60.0
"""For how long a batch is offered. A receiver may refuse one batch for good; then the next ones must not wait."""
CLOSE_S: Final = 1.0
"""How long the end of a process waits until the receiver has the rest. A receiver that hangs is not waited for."""
FIELD_MAX: Final = 1024
"""Characters of a client's header about its trace. It goes on with each message, some of which have little room."""
_NOT_SAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
"""A `traceparent` whose sender does not record the trace: the lowest bit of the flags. The SDK sets the next one."""
_NO_CONTEXT: Final = contexts.Context()
_NOT_RECORDED: Final = contextlib.nullcontext(NO_SPAN)
_KINDS: Final = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
_DEFAULT: Final[Mapping[str, str]] = {"grpc": "http://localhost:4317", "http/protobuf": "http://localhost:4318"}


def _exporter(protocol: Literal["grpc", "http/protobuf"]) -> SpanExporter:
    """It reads the standard variables itself: address, headers, certificates, compression, time limit."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if text == "":
        return default
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f"{name}={text} is not a whole number above 0")


class _LastWords(logging.Handler):
    """Keeps the exporter's last message, for our one line: the exporter logs each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class Delivery(SpanProcessor):
    """Sends ended spans from a thread of its own. While the receiver is away, it keeps as many as the queue takes."""

    def __init__(self, exporter: SpanExporter, where: str, environ: Mapping[str, str]) -> None:
        self._exporter = exporter
        self._where = where
        self._most = _number(environ, names.OTEL_BSP_MAX_QUEUE_SIZE, 2048)
        self._batch = min(self._most, _number(environ, names.OTEL_BSP_MAX_EXPORT_BATCH_SIZE, 512))
        self._every_s = _number(environ, names.OTEL_BSP_SCHEDULE_DELAY, 5000) / 1000
        self._queue: deque[ReadableSpan] = deque()
        self._dropped = self._given_up = self._in_hand = 0
        self._moving = threading.Lock()
        """Held while spans go from one of these counts to another."""
        self._failing = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._said = _LastWords()
        _EXPORTERS.addHandler(self._said)
        _EXPORTERS.propagate = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """It never waits."""
        if not span.get_span_context().trace_flags.sampled:
            return
        if len(self._queue) >= self._most:
            self._dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= self._batch:
            self._wake.set()

    def shutdown(self) -> None:
        """Send the rest within `CLOSE_S`; nothing is waited for if the receiver does not answer anyway."""
        self._closing.set()
        self._wake.set()
        self._thread.join(0.0 if self._failing else CLOSE_S)
        with self._moving:
            left = self._lost + len(self._queue) + self._in_hand
        self._exporter.shutdown()
        _EXPORTERS.removeHandler(self._said)
        if left:
            log.warning("%d spans could not be delivered to %s before this process ended", left, self._where)

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._queue):
            self._wake.wait(self._every_s)
            self._wake.clear()
            while self._queue:
                with self._moving:
                    batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch))]
                    self._in_hand = len(batch)
                sent = self._sent(batch)
                with self._moving:
                    self._given_up += 0 if sent else len(batch)
                    self._in_hand = 0

    def _sent(self, batch: list[ReadableSpan]) -> bool:
        give_up_s = time.monotonic() + KEEP_S
        while not self._delivered(batch):
            if self._closing.is_set() or time.monotonic() >= give_up_s:
                return False
            self._closing.wait(RETRY_S)
        return True

    @property
    def _lost(self) -> int:
        return self._dropped + self._given_up

    def _delivered(self, batch: list[ReadableSpan]) -> bool:
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:
            taken, self._said.text = False, f"{type(error).__name__}: {error}"
        if taken and self._failing:
            log.warning("traces are delivered to %s again; %d spans were lost", self._where, self._lost)
            self._dropped = self._given_up = 0
        elif not taken and not self._failing and not self._closing.is_set():
            log.warning(
                "traces cannot be delivered to %s: %s. Requests go on; up to %d spans are kept and offered again",
                self._where,
                " ".join(self._said.text.split()),
                self._most,
            )
        self._failing = not taken
        return taken


class _Recorded:
    """`tracing.Span` on one of OpenTelemetry's."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def failed(self, error_type: str) -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR)


class _Block(_Recorded):
    """The running task's span for the length of a block."""

    __slots__ = ("_context", "_token")

    def __init__(self, span: trace.Span, context: contexts.Context | None = None) -> None:
        super().__init__(span)
        self._context = context

    def __enter__(self) -> Span:
        self._token = contexts.attach(trace.set_span_in_context(self._span, self._context))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if isinstance(error, asyncio.CancelledError):
            self.set({"dynamo.cancelled": True})
        elif error is not None:
            self.failed(type(error).__name__)
        self._span.end()


class _Continued:
    """Another process's span is the running task's for the length of a block."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: contexts.Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = contexts.attach(self._context)

    def __exit__(self, *_: object) -> None:
        contexts.detach(self._token)


class _Unrecorded:
    """A request that nobody records is the running task's for the length of a block."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: _NotSampled) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._token = contexts.attach(trace.set_span_in_context(self._span, _NO_CONTEXT))
        return NO_SPAN

    def __exit__(self, *_: object) -> None:
        contexts.detach(self._token)


class _SpanStages(Stages):
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._context = contexts.get_current()
        self._open: trace.Span | None = None

    def begin(self, name: str) -> None:
        self.end()
        self._open = self._tracer.start_span(name, self._context)

    def end(self) -> None:
        if self._open is not None:
            self._open.end()
            self._open = None


class _NotSampled(trace.NonRecordingSpan):
    """A request that nobody records: most are. Its headers go on as they came, and nothing is made within it.

    Its identity is read from the headers only if a user's own code asks for it.
    """

    def __init__(
        self,
        propagator: TextMapPropagator,
        context: trace.SpanContext = trace.INVALID_SPAN_CONTEXT,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(context)
        self._context: trace.SpanContext = context
        self._propagator = propagator
        self._headers = headers

    def get_span_context(self) -> trace.SpanContext:
        if self._headers is not None and not self._context.is_valid:
            read = self._propagator.extract(self._headers, _NO_CONTEXT)
            self._context = trace.get_current_span(read).get_span_context()
        return self._context

    def headers(self) -> dict[str, str]:
        """Those that take the trace along."""
        if self._headers is None:
            self._headers = {}
            self._propagator.inject(self._headers, trace.set_span_in_context(self, _NO_CONTEXT))
        return self._headers


class Episode(_Recorded):
    """A span that belongs to no request. It lasts until `end`."""

    @property
    def context(self) -> trace.SpanContext:
        """Names it, for links."""
        return self._span.get_span_context()

    def end(self) -> None:
        """Now."""
        self._span.end()


class Tracing:
    """The traces of this process. See `tracing.begin`. Raises `ConfigError`, ImportError, or what the SDK raises."""

    def __init__(
        self,
        environ: Mapping[str, str],
        protocol: Literal["grpc", "http/protobuf"],
        service: str,
        namespace: str,
        instance: str,
        *,
        sampled: bool,
    ) -> None:
        where = next((environ[name] for name in ENDPOINTS if environ.get(name)), _DEFAULT[protocol])
        off = environ.get(names.OTEL_TRACES_SAMPLER, "").endswith("always_off")
        self._sampler = None if sampled or off else ALWAYS_ON
        self._namespace = namespace
        self._propagator = propagate.get_global_textmap()
        self._fields = frozenset(self._propagator.fields) - {"baggage"}
        self._raw_fields = {name.encode(): name for name in self._fields}
        follows = environ.get(names.OTEL_TRACES_SAMPLER, "parentbased_always_on").strip().lower()
        self._may_skip = follows.startswith("parentbased_") and self._fields == {"traceparent", "tracestate"}
        """Whether a trace that its sender does not record is recorded by nobody after it."""
        self._delivery = Delivery(_exporter(protocol), f"{mask_text(where)} ({protocol})", environ)
        self.rename(service, instance)

    def rename(self, service: str, instance: str) -> None:
        """Name this process anew in traces. The variables may name it otherwise."""
        ours = {"service.name": service, "service.namespace": self._namespace, "service.instance.id": instance}
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        provider = TracerProvider(self._sampler, resource, shutdown_on_exit=False)
        provider.add_span_processor(self._delivery)
        self._tracer = provider.get_tracer("dynamo_local", __version__)

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most."""
        self._delivery.shutdown()

    def server_span(
        self, name: str, headers: Iterable[tuple[bytes, bytes]], attributes: Callable[[], Attributes]
    ) -> contextlib.AbstractContextManager[Span]:
        """The first span of a request here, within the trace that its headers name, if they do."""
        given = {
            field: value.decode("latin-1")
            for raw, value in headers
            if (field := self._raw_fields.get(raw)) is not None and len(value) <= FIELD_MAX
        }
        if len(given) == 1 and self._skips(given):  # a client's `tracestate` is checked first
            return _Unrecorded(_NotSampled(self._propagator, headers=given))
        context = self._propagator.extract(given, contexts.Context()) if given else _NO_CONTEXT
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER)
        if span.is_recording():
            span.set_attributes(attributes())
        elif self._may_skip:
            return _Unrecorded(_NotSampled(self._propagator, span.get_span_context()))
        return _Block(span, context)

    def continued(self, carrier: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        """The trace of these headers goes on within the block."""
        if self._skips(carrier):
            span = _NotSampled(self._propagator, headers=dict(carrier))
            return _Continued(trace.set_span_in_context(span, _NO_CONTEXT))
        return _Continued(self._propagator.extract(carrier, _NO_CONTEXT))

    def _skips(self, carrier: Mapping[str, str]) -> bool:
        return self._may_skip and _NOT_SAMPLED.fullmatch(carrier.get("traceparent", "")) is not None

    def span(self, name: str, kind: Kind, attributes: Attributes | None) -> contextlib.AbstractContextManager[Span]:
        """A step within the running task's span. One that is not recorded has no recorded children."""
        parent = trace.get_current_span()
        if isinstance(parent, _NotSampled):
            return _NOT_RECORDED
        within = parent.get_span_context()
        if not within.is_valid or not (parent.is_recording() or within.is_remote):
            return _NOT_RECORDED
        return _Block(self._tracer.start_span(name, None, _KINDS[kind], attributes))

    def recording(self) -> bool:
        """Whether the running task's span is recorded."""
        return trace.get_current_span().is_recording()

    def current(self) -> Span:
        """The running task's span, or one that records nothing."""
        span = trace.get_current_span()
        return _Recorded(span) if span.is_recording() else NO_SPAN

    def stages(self) -> Stages:
        """Stages within the running task's span, if it is recorded."""
        return _SpanStages(self._tracer) if self.recording() else NO_STAGES

    def past(self, name: str, began_at_s: float, attributes: Attributes) -> None:
        """A step that another process began at that time (seconds since 1970), and that ends now."""
        parent = trace.get_current_span()
        if not isinstance(parent, _NotSampled) and parent.get_span_context().is_valid:
            self._tracer.start_span(name, attributes=attributes, start_time=int(began_at_s * 1e9)).end()

    def carrier(self) -> dict[str, str] | None:
        """The headers that take the running task's trace along; None: it is in none."""
        current = trace.get_current_span()
        if isinstance(current, _NotSampled):
            return self.carried(current.headers())
        if not current.get_span_context().is_valid:
            return None
        found: dict[str, str] = {}
        self._propagator.inject(found)
        return self.carried(found)

    def carried(self, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Those of these headers that are about a trace; None: there are none."""
        return {name: value for name, value in headers.items() if name in self._fields} or None

    def episode(
        self,
        name: str,
        attributes: Attributes,
        *,
        within: Episode | None = None,
        because: Iterable[trace.SpanContext] = (),
        began_at_s: float | None = None,
    ) -> Episode:
        """A span that begins now (or at that time, in seconds since 1970), with links to its causes."""
        context = contexts.Context()
        if within is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(within.context), context)
        start = None if began_at_s is None else int(began_at_s * 1e9)
        links = [trace.Link(cause) for cause in because]
        return Episode(self._tracer.start_span(name, context, attributes=attributes, links=links, start_time=start))
