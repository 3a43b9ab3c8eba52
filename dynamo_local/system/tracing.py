"""Traces of requests, for OpenTelemetry. Off unless the standard variables ask for them: one comparison then.

A request's way through the processes is one trace. Its Frontend begins the trace, or goes on with the client's
(`traceparent`). The other processes take part only in traces that reach them: calls of our own make no spans.

`carrier` gives the headers that take the trace along, and `continued` takes them up in the next process. Between the
two, OpenTelemetry's own context has the current span, so spans of user code join.

Only `system.otel` imports OpenTelemetry, and only `begin` imports that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal

from dynamo_local.errors import ConfigError, how_to_install
from dynamo_local.system.spans import ENDPOINTS, NO_SPAN, NO_STAGES, Attributes, Kind, Span, Stages

if TYPE_CHECKING:
    from dynamo_local.system.otel import Tracing

PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER: Final = "OTEL_TRACES_EXPORTER"

_NOTHING: Final = contextlib.nullcontext()
_NOT_RECORDED: Final = contextlib.nullcontext(NO_SPAN)

_tracing: Tracing | None = None


# --- on or off


def wanted(environ: Mapping[str, str]) -> Literal["grpc", "http/protobuf"] | None:
    """The protocol by which the standard variables want traces to be sent; None: they want none.

    Raises `ConfigError` for an exporter or a protocol that there is not.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environ.get(EXPORTER, "").strip().lower()
    if exporter == "none" or not (exporter or any(environ.get(name) for name in ENDPOINTS)):
        return None
    if exporter not in ("", "otlp"):
        raise ConfigError(f"{EXPORTER}={exporter}: traces are sent by OTLP only; say otlp, or none")
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc").strip().lower()
    if protocol == "grpc":
        return "grpc"
    if protocol == "http/protobuf":
        return "http/protobuf"
    raise ConfigError(f"{PROTOCOLS[1]}={protocol} is not known; say grpc or http/protobuf")


def begin(
    environ: Mapping[str, str],
    service: str,
    namespace: str,
    instance: str,
    tell: Callable[[str], None],
    *,
    sampled: bool = True,
) -> None:
    """Trace from now on, if the variables ask for it. If that is not possible, `tell` gets one line and all goes on.

    `service`, `namespace` and `instance` name this process in traces. Without `sampled`, the sampler of the variables
    does not count: everything is recorded.
    """
    global _tracing
    try:
        if (protocol := wanted(environ)) is None:
            return
        from dynamo_local.system.otel import Tracing

        _tracing = Tracing(environ, protocol, service, namespace, instance, sampled=sampled)
    except ConfigError as error:
        tell(f"no traces are sent: {error}")
    except ImportError as error:
        tell(f"no traces are sent: {error.name} is not installed: {how_to_install('otel')}")
    except Exception as error:  # the SDK's own, for a variable's value that it cannot use
        tell(f"no traces are sent: {type(error).__name__}: {error}; check the OTEL_* variables")


def renamed(service: str, instance: str) -> None:
    """This process has another role, and so another name in traces."""
    if _tracing is not None:
        _tracing.rename(service, instance)


def close() -> None:
    """Send what is left, if the receiver takes it soon. This blocks for `otel.CLOSE_S` at most."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()


def active() -> Tracing | None:
    """For spans that belong to no request; None while traces are off."""
    return _tracing


# --- a request's way


def server_span(
    name: str, headers: Iterable[tuple[bytes, bytes]], attributes: Callable[[], Attributes]
) -> contextlib.AbstractContextManager[Span]:
    """Within the block the running task is in a trace: the client's, or a new one. `attributes` are asked if it is
    recorded."""
    if _tracing is None:
        return _NOT_RECORDED
    return _tracing.server_span(name, headers, attributes)


def continued(carrier: Mapping[str, str] | None) -> contextlib.AbstractContextManager[None]:
    """Within the block, and in tasks that it starts, the trace of this carrier goes on."""
    if _tracing is None or not carrier:
        return _NOTHING
    return _tracing.continued(carrier)


def span(
    name: str, kind: Kind = "internal", attributes: Attributes | None = None
) -> contextlib.AbstractContextManager[Span]:
    """Within the block this is the running task's span, if the task is in a trace. An exception is its failure."""
    if _tracing is None:
        return _NOT_RECORDED
    return _tracing.span(name, kind, attributes)


def current() -> Span:
    """The running task's span."""
    return NO_SPAN if _tracing is None else _tracing.current()


def recording() -> bool:
    """Whether the running task's span is recorded."""
    return _tracing is not None and _tracing.recording()


def note(attributes: Callable[[], Attributes]) -> None:
    """Add attributes to the running task's span. They are computed only if it is recorded."""
    if recording():
        current().set(attributes())


def stages() -> Stages:
    """For steps of the running task's span that a generator makes, whose own block would leak into its caller."""
    return NO_STAGES if _tracing is None else _tracing.stages()


def past(name: str, began_at_s: float, attributes: Attributes) -> None:
    """A step that ends now, and began at that time (seconds since 1970), in another process."""
    if _tracing is not None:
        _tracing.past(name, began_at_s, attributes)


def carrier() -> dict[str, str] | None:
    """Headers that take the running task's trace along. None: traces are off, or the task is in none."""
    return None if _tracing is None else _tracing.carrier()


def carried(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Those of the headers that are about a trace; None while traces are off."""
    return None if _tracing is None else _tracing.carried(headers)
