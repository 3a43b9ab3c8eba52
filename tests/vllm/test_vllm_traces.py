"""vLLM's own span of a request is a part of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.drivers.otlp import grpc_receiver
from tests.vllm.hosts import VllmHost

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(900)]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "tiny", "prompt": "the same words again", "max_tokens": 4, "ignore_eos": True}


def test_the_engines_span_joins_the_requests_trace(vllm_host: VllmHost, tmp_path: Path) -> None:
    with grpc_receiver() as receiver:
        env = {**vllm_host.env, **receiver.env(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc")}
        host = replace(vllm_host, env=env)
        with host.aggregated(tmp_path, **{"otlp-traces-endpoint": receiver.url}).started() as served:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = httpx.post(f"{served.url}/v1/completions", json=BODY, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            receiver.wait_for(
                lambda spans: {"generate", "llm_request"} <= {each.name for each in spans if each.trace == TRACE}
            )
    found = {each.name: each for each in receiver.spans if each.trace == TRACE}
    assert found["llm_request"].parent in {found["generate"].id, found["prefill"].id if "prefill" in found else ""}
    assert found["llm_request"].attributes["gen_ai.usage.completion_tokens"] == BODY["max_tokens"]
