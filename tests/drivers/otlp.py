"""A receiver of traces: OTLP over gRPC with OpenTelemetry's own service, and over HTTP. It keeps each span.

with grpc_receiver() as receiver:
    …                       # OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url
    receiver.wait_for(lambda spans: "decode" in spans.names())
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.proto", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

POLL_S = 0.02
WITHIN_S = 30.0


@dataclass(frozen=True)
class Received:
    """One span. Ids are hex; `parent` is empty at the root. Times are nanoseconds since 1970."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str
    kind: int
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any]
    links: tuple[str, ...]
    events: tuple[str, ...]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _spans(request: Any) -> Iterator[Received]:
    for of_resource in request.resource_spans:
        process = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Received(
                    name=span.name,
                    service=process["service.name"],
                    instance=process.get("service.instance.id", ""),
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    kind=span.kind,
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes=_attributes(span.attributes),
                    links=tuple(link.span_id.hex() for link in span.links),
                    events=tuple(event.name for event in span.events),
                )


@dataclass
class Receiver:
    """`hangs`: while it is set, requests are taken and not answered."""

    url: str = ""
    protocol: str = ""
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: int = 0
    hangs: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def env(self, **more: str) -> dict[str, str]:
        """The variables that send traces here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            **more,
        }

    def take(self, data: bytes, headers: dict[str, str]) -> None:
        self.asked += 1
        if self.hangs.is_set():
            self.released.wait()
        self.headers.append(headers)
        self.spans.extend(_spans(service.ExportTraceServiceRequest.FromString(data)))

    def wait_for(self, holds: Callable[[list[Received]], bool], within_s: float = WITHIN_S) -> list[Received]:
        end_s = time.monotonic() + within_s
        while not holds(found := list(self.spans)):
            assert time.monotonic() < end_s, [(span.service, span.name, span.attributes) for span in found]
            time.sleep(POLL_S)
        return found


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver(protocol="grpc")

    class Servicer(service_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            headers = {pair.key: pair.value for pair in context.invocation_metadata()}
            receiver.take(request.SerializeToString(), headers)
            return service.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    service_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.stop(None).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver(protocol="http/protobuf")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            receiver.take(body, {name.lower(): value for name, value in self.headers.items()})
            answer = service.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
