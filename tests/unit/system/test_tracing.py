"""Traces as the standard variables ask for them, sent to a real receiver over gRPC and over HTTP."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace

from dynamo_local.core.secrets import MASK, allowed_env, mask_env
from dynamo_local.errors import ConfigError
from dynamo_local.system import tracing
from dynamo_local.system.spans import NO_SPAN, NO_STAGES
from tests.drivers.otlp import Received, Receiver, grpc_receiver, http_receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({}, None),
        (ENDPOINT, "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, "grpc"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "grpc"),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, None),
        ({"OTEL_SDK_DISABLED": "true", **ENDPOINT}, None),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", **ENDPOINT}, "http/protobuf"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", **ENDPOINT},
            "http/protobuf",
        ),
    ],
)
def test_the_standard_variables_switch_traces_on(environ: dict[str, str], protocol: str | None) -> None:
    assert tracing.wanted(environ) == protocol


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", **ENDPOINT}, "http/json is not known"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many", **ENDPOINT}, "OTEL_BSP_MAX_QUEUE_SIZE=many"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_all_goes_on(environ: dict[str, str], named: str) -> None:
    lines: list[str] = []
    tracing.begin(environ, "Frontend", "dynamo", "dynamo_Frontend", lines.append)
    assert len(lines) == 1
    assert named in lines[0]
    assert tracing.active() is None


def test_without_the_extra_one_line_names_it() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from dynamo_local.system import tracing\n"
        "tracing.begin({'OTEL_TRACES_EXPORTER': 'otlp'}, 'Frontend', 'dynamo', 'dynamo_Frontend', print)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stdout.splitlines()
    assert "opentelemetry is not installed" in line
    assert ".[otel]" in line


def test_workers_get_the_variables_and_nobody_is_shown_the_headers() -> None:
    given = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=abc", "OTEL_TRACES_SAMPLER": "always_on"}
    assert allowed_env(given) == given
    assert mask_env(given) == {**given, "OTEL_EXPORTER_OTLP_HEADERS": MASK}


def test_off_nothing_is_carried_and_nothing_recorded() -> None:
    with tracing.server_span("POST /", [(b"traceparent", SAMPLED.encode())], dict), tracing.span("step"):
        assert tracing.carrier() is None
        assert not tracing.recording()


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, receiver: Receiver, **environ: str) -> Iterator[None]:
    found = receiver.env(**environ)
    for name, value in found.items():  # the SDK reads them itself
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    tracing.begin(found, "Frontend", "dynamo", "dynamo_Frontend", lines.append)
    assert lines == []
    try:
        yield
    finally:
        tracing.close()


def request(traceparent: str | None = None) -> None:
    """A request that comes to this process, goes on to another one, and does a step there."""
    headers = [] if traceparent is None else [(b"traceparent", traceparent.encode())]
    with tracing.server_span("POST /v1/completions", headers, lambda: {"gen_ai.request.model": "sim-tiny"}):
        carried = tracing.carrier()
    with tracing.continued(carried), tracing.span("generate", "server"):
        stages = tracing.stages()
        stages.begin("prefill")
        stages.begin("decode")
        stages.end()


def by_name(spans: list[Received]) -> Mapping[str, Received]:
    return {span.name: span for span in spans}


@pytest.mark.parametrize("receiving", [grpc_receiver, http_receiver])
def test_a_trace_goes_on_through_processes(monkeypatch: pytest.MonkeyPatch, receiving: Any) -> None:
    with receiving() as receiver, traced(monkeypatch, receiver, OTEL_EXPORTER_OTLP_HEADERS="x-key=abc"):
        request(SAMPLED)
        found = by_name(receiver.wait_for(lambda spans: len(spans) == 4))
    first, there = found["POST /v1/completions"], found["generate"]
    assert {span.trace for span in found.values()} == {TRACE}
    assert (first.parent, there.parent) == (PARENT, first.id)
    assert found["prefill"].parent == found["decode"].parent == there.id
    assert found["prefill"].ended <= found["decode"].began
    assert first.attributes == {"gen_ai.request.model": "sim-tiny"}
    assert (first.service, first.instance) == ("Frontend", "dynamo_Frontend")
    assert receiver.headers[0]["x-key"] == "abc"


def test_a_client_that_does_not_sample_is_followed_and_the_trace_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as receiver, traced(monkeypatch, receiver):
        with tracing.server_span("POST /", [(b"traceparent", UNSAMPLED.encode())], dict):
            assert tracing.carrier() is not None
            assert (tracing.carrier() or {})["traceparent"].startswith(f"00-{TRACE}-")
            assert (tracing.carrier() or {})["traceparent"].endswith("-00")
        request(UNSAMPLED)
        request()
        found = receiver.wait_for(lambda spans: len(spans) >= 4)
    assert TRACE not in {span.trace for span in found}


@pytest.mark.parametrize("flags", ["00", "02"])
def test_what_its_sender_does_not_record_costs_no_spans_and_names_its_trace(
    monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    carrier = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "a=b"}
    with http_receiver() as receiver, traced(monkeypatch, receiver):
        with tracing.continued(carrier), tracing.span("generate", "server") as step, tracing.span("route") as inner:
            assert step is inner is NO_SPAN
            assert tracing.stages() is NO_STAGES
            assert tracing.carrier() == carrier
            tracing.past("queue", time.time() - 1.0, {})
            of_user = trace.get_current_span().get_span_context()
            assert (f"{of_user.trace_id:032x}", f"{of_user.span_id:016x}") == (TRACE, PARENT)
            assert not of_user.trace_flags.sampled
        request()
        receiver.wait_for(lambda spans: len(spans) >= 4)
        assert TRACE not in {span.trace for span in receiver.spans}


def test_a_sampler_that_follows_no_parent_decides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as receiver, traced(monkeypatch, receiver, OTEL_TRACES_SAMPLER="always_on"):
        request(UNSAMPLED)
        found = receiver.wait_for(lambda spans: len(spans) == 4)
    assert {span.trace for span in found} == {TRACE}


@pytest.mark.parametrize("traceparent", [f"00-{'0' * 32}-{PARENT}-00", f"00-{TRACE}-{'0' * 16}-00", "00-nonsense-00"])
def test_a_trace_without_identity_is_none(monkeypatch: pytest.MonkeyPatch, traceparent: str) -> None:
    with http_receiver() as receiver, traced(monkeypatch, receiver):
        request(traceparent)
        found = receiver.wait_for(lambda spans: len(spans) == 4)
    assert TRACE not in {span.trace for span in found}


def test_a_header_that_is_too_long_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [(b"traceparent", SAMPLED.encode()), (b"tracestate", b"a=" + b"x" * 2000)]
    with http_receiver() as receiver, traced(monkeypatch, receiver):
        with tracing.server_span("POST /", long, dict):
            assert (tracing.carrier() or {}).keys() == {"traceparent"}
        receiver.wait_for(bool)


def test_a_ratio_samples_whole_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    with http_receiver() as receiver, traced(monkeypatch, receiver, **sampler):
        for _ in range(400):
            request()
        tracing.close()
    traces = [span.trace for span in receiver.spans]
    assert 40 < len(set(traces)) < 180
    assert all(traces.count(each) == 4 for each in set(traces))


def test_calls_of_our_own_make_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as receiver, traced(monkeypatch, receiver):
        with tracing.continued(None), tracing.span("status", "server"):
            assert tracing.carrier() is None
        tracing.close()
    assert receiver.spans == []


def test_the_users_own_names_count_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as receiver, traced(monkeypatch, receiver, OTEL_SERVICE_NAME="chat"):
        request()
        tracing.renamed("PrefillWorker", "dynamo_PrefillWorker_1")
        request()
        found = receiver.wait_for(lambda spans: len(spans) == 8)
    assert {span.service for span in found} == {"chat"}
    assert {span.instance for span in found} == {"dynamo_Frontend", "dynamo_PrefillWorker_1"}


def test_a_failure_is_named_and_its_words_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as receiver, traced(monkeypatch, receiver):
        with pytest.raises(ConfigError), tracing.server_span("POST /", [], dict):
            raise ConfigError("the prompt was: my secret")
        (span,) = receiver.wait_for(bool)
    assert span.failed
    assert span.attributes == {"error.type": "ConfigError"}


@pytest.mark.timing
@pytest.mark.parametrize("receiving", [grpc_receiver, http_receiver])
def test_a_receiver_that_hangs_costs_one_line_and_no_span_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, receiving: Any
) -> None:
    with receiving() as receiver, traced(monkeypatch, receiver, OTEL_EXPORTER_OTLP_TIMEOUT="0.2"):
        receiver.hangs.set()
        began_s, slowest_s = time.monotonic(), 0.0
        while receiver.asked < 2:
            at_s = time.perf_counter()
            request()
            slowest_s = max(slowest_s, time.perf_counter() - at_s)
            assert time.monotonic() - began_s < 30
            time.sleep(0.02)
        receiver.hangs.clear()
        receiver.released.set()
        request(SAMPLED)
        receiver.wait_for(lambda spans: TRACE in {span.trace for span in spans})
    assert slowest_s < 0.2
    told = [record.getMessage() for record in caplog.records if record.name.startswith("dynamo_local")]
    assert len(told) == 2, told
    assert not logging.getLogger("opentelemetry.exporter").propagate  # the SDK's own lines, one for each batch
    assert told[0].startswith(f"traces cannot be delivered to {receiver.url}")
    assert told[1].endswith("again; 0 spans were lost")


def test_a_queue_that_is_full_drops_new_spans_and_says_how_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"}
    with http_receiver() as receiver, traced(monkeypatch, receiver, **small):
        receiver.hangs.set()
        for _ in range(50):
            request()
        receiver.wait_for(lambda _: receiver.asked > 0)
        began_s = time.monotonic()
        tracing.close()
        assert time.monotonic() - began_s < 5.0
    assert "200 spans could not be delivered" in caplog.records[-1].getMessage()
