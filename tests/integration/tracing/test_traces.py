"""A disaggregated graph whose processes send traces: most by gRPC, the PrefillWorker by HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import pytest

from tests.drivers.eventually import eventually
from tests.drivers.otlp import Received, Receiver, grpc_receiver, http_receiver
from tests.drivers.served import DISAGG, Served

pytestmark = [pytest.mark.infra, pytest.mark.timeout(150)]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "the same words again " * 100
PARENTS = {
    "POST /v1/completions": None,
    "processor": "POST /v1/completions",
    "route": "processor",
    "generate": "processor",
    "queue": "generate",
    "prefill": "generate",
    "transfer": "generate",
    "decode": "generate",
}
"""Each span of a request that is prefilled remotely, and the span that it is a part of."""
PROCESSES = {"queue": "PrefillWorker", "prefill": "PrefillWorker", "generate": "VllmWorker", "decode": "VllmWorker"}


@dataclass
class Traced:
    served: Served
    receivers: Sequence[Receiver]

    def spans(self) -> list[Received]:
        return [span for receiver in self.receivers for span in receiver.spans]

    async def trace(self, trace: str, count: int) -> dict[str, Received]:
        """The spans of a trace, once there are that many."""
        await eventually(lambda: len([span for span in self.spans() if span.trace == trace]) >= count)
        return {span.name: span for span in self.spans() if span.trace == trace}


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with grpc_receiver() as by_grpc, http_receiver() as by_http:
        envs = json.dumps(by_http.env())
        words = ("--VllmWorker.conditional-disagg=false", f"--PrefillWorker.ServiceArgs.envs={envs}")
        env = by_grpc.env(OTEL_EXPORTER_OTLP_HEADERS="x-key=not-to-be-shown", OTEL_EXPORTER_OTLP_TIMEOUT="0.5")
        with Served(*words, target=DISAGG, env=env).started() as served:
            yield Traced(served, (by_grpc, by_http))


async def ask(traced: Traced, **headers: str) -> float:
    """The seconds of one request, which must succeed."""
    body = {"model": "sim-tiny", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=traced.served.url, timeout=30) as client:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.elapsed.total_seconds()


async def test_a_request_is_one_trace_from_the_client_to_the_last_token(traced: Traced) -> None:
    await ask(traced, traceparent=f"00-{TRACE}-{PARENT}-01")
    found = await traced.trace(TRACE, len(PARENTS))
    assert found.keys() == PARENTS.keys()
    for name, parent in PARENTS.items():
        assert found[name].parent == (PARENT if parent is None else found[parent].id), name
        assert found[name].service == PROCESSES.get(name, found[name].service)
    assert found["queue"].ended <= found["prefill"].ended <= found["transfer"].ended <= found["decode"].ended
    asked = found["POST /v1/completions"].attributes
    expected = {
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "sim-tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert expected.items() <= asked.items()
    assert asked["gen_ai.usage.input_tokens"] > 100
    assert "the same words" not in str(found)


async def test_a_drain_is_a_span_with_a_link_to_its_command(traced: Traced) -> None:
    traced.served.ok("scale", "PrefillWorker", "+1")
    traced.served.ok("drain", "dynamo_PrefillWorker_1", "--wait")

    await eventually(lambda: any(span.name == "drain" for span in traced.spans()))
    (drain,) = [span for span in traced.spans() if span.name == "drain"]
    (command,) = [span for span in traced.spans() if span.id in drain.links]
    assert (command.name, command.attributes["dynamo.name"]) == ("command Drain", "dynamo_PrefillWorker_1")
    assert drain.attributes["dynamo.worker"] == "dynamo_PrefillWorker_1"
    assert drain.attributes["dynamo.outcome"] == "exited"
    assert not drain.failed


async def test_a_receiver_that_hangs_slows_no_request_and_is_one_line(traced: Traced) -> None:
    quiet_s = sorted([await ask(traced) for _ in range(10)])
    for receiver in traced.receivers:
        receiver.hangs.set()
    hung_s = sorted([await ask(traced) for _ in range(10)])
    log = traced.served.paths.log_file("dynamo_Frontend")
    await eventually(lambda: "traces cannot be delivered" in log.read_text())
    hung_s = sorted([*hung_s, *[await ask(traced) for _ in range(10)]])
    await asyncio.to_thread(traced.receivers[0].wait_for, lambda _: traced.receivers[0].asked > 3)
    assert hung_s[len(hung_s) // 2] < 2 * quiet_s[len(quiet_s) // 2] + 0.05
    told = [line for line in log.read_text().splitlines() if "traces" in line or "opentelemetry" in line]
    assert len(told) == 1, told
    for receiver in traced.receivers:
        receiver.hangs.clear()
        receiver.released.set()
    await ask(traced, traceparent=f"00-{TRACE[::-1]}-{PARENT}-01")
    await traced.trace(TRACE[::-1], len(PARENTS))
    assert "; 0 spans were lost" in log.read_text()


def test_the_receivers_key_is_in_no_log_and_in_no_statefile(traced: Traced) -> None:
    logs = traced.served.paths.logs
    for path in (*logs.rglob("*"), traced.served.paths.statefile):
        if path.is_file():
            assert "not-to-be-shown" not in path.read_text(errors="replace"), path
