"""Plain `vllm serve` behind `runtime: http`, on vLLM's CPU build: requests, load, drains, prefill and decode apart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.components.proxy.app import has_error_event
from dynamo_local.core.routing import disagg as kv_handover
from tests.drivers.scaled import ascale, names
from tests.drivers.served import Served, auntil
from tests.vllm.asking import Streaming, complete, complete_all, prompts
from tests.vllm.hosts import START_TIMEOUT_S, VllmHost

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(1500)]

TOKENS = 16
LONG_TOKENS = 400
LEAVE_S = 60.0
PATHS = ("/v1/completions", "/v1/chat/completions")


def section(host: VllmHost, role: str, workers: int, *more: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """So many `vllm serve`, one thread each; `before` are words in front of the command."""
    return {
        "command": [*before, *host.vllm_serve("tiny"), *more],
        "runtime": "http",
        "role": role,
        "model": str(host.model),
        "ServiceArgs": {"workers": workers},
    }


def served(host: VllmHost, folder: Path, **sections: dict[str, Any]) -> Served:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"Host": {"gpus": host.gpus}, **sections}))
    deadline = ("--start-deadline", str(START_TIMEOUT_S))
    return Served(*deadline, target=("-f", str(file)), env=host.env, timeout_s=START_TIMEOUT_S)


def handing_over(host: VllmHost, role: str) -> dict[str, Any]:
    """One `vllm serve` that gives or takes KV by NIXL."""
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    channel = ("env", "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT={port:nixl}")
    return section(host, role, 1, "--kv-transfer-config", json.dumps(config), before=channel)


def url_of(served: Served, worker: str) -> str:
    cmdline = psutil.Process(served.pids()[worker]).children()[0].cmdline()
    return f"http://127.0.0.1:{cmdline[cmdline.index('--port') + 1]}"


def transferred(served: Served) -> float:
    """Prompt tokens that the decode server has got from elsewhere."""
    text = httpx.get(f"{url_of(served, 'Decode')}/metrics").text
    return Metrics(text).sum("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") or 0.0


async def test_vllm_serve_answers_and_drains(vllm_host: VllmHost, tmp_path: Path) -> None:
    with served(vllm_host, tmp_path, Server=section(vllm_host, "aggregated", 2)).started() as graph:
        asked = prompts(6)
        first, again = await complete_all(graph, asked, TOKENS), await complete_all(graph, asked, TOKENS)
        assert first == again
        assert len(set(first)) > 1
        async with graph.client() as client:
            assert (await complete(client, asked[0], TOKENS))[0] == first[0]
            await _leaves_and_drains(graph, client)
            assert (await complete(client, asked[1], TOKENS))[0] == first[1]


async def _leaves_and_drains(graph: Served, client: Any) -> None:
    streams = [Streaming(client, prompt, LONG_TOKENS) for prompt in prompts(5, seed=8)]
    await asyncio.gather(*(stream.started.wait() for stream in streams))
    load = await auntil(lambda: graph.worker("Server")["load"], 30.0, what=lambda: graph.worker("Server"))
    assert load["kv_total_blocks"] == 300
    gone, *stay = streams
    gone.task.cancel()
    await asyncio.wait({gone.task})
    await ascale(graph, "Server", "-1")
    assert await asyncio.gather(*(stream.task for stream in stay)) == ["length"] * len(stay)
    assert [stream.tokens for stream in stay] == [LONG_TOKENS] * len(stay)
    await auntil(lambda: "Server_1" not in graph.states(), LEAVE_S, what=graph.states)
    assert names(graph, "Server") == ["Server"]


async def test_vllm_serve_hands_prefills_over(vllm_host: VllmHost, tmp_path: Path) -> None:
    sections = {"Prefill": handing_over(vllm_host, "prefill"), "Decode": handing_over(vllm_host, "decode")}
    with served(vllm_host, tmp_path, **sections).started() as graph:
        asked = prompts(4)
        handed = await complete_all(graph, asked, TOKENS)
        moved = transferred(graph)
        assert moved > 0
        decode, prefill = url_of(graph, "Decode"), url_of(graph, "Prefill")
        prepared = [(path, stream, prefilled(prefill, path, asked[0])) for path in PATHS for stream in (True, False)]
        (server,) = psutil.Process(graph.pids()["Prefill"]).children()
        os.kill(server.pid, signal.SIGKILL)
        assert await complete_all(graph, asked, TOKENS) == handed
        for path, stream, body in prepared:
            await _is_told_of_lost_kv(decode + path, {**body, "stream": stream})
        assert await complete_all(graph, asked, TOKENS) == handed


def prefilled(url: str, path: str, prompt: str) -> dict[str, Any]:
    """The body for the decode server, of a prompt whose KV the prefill server keeps."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, **asked}
    answer = httpx.post(url + path, json=kv_handover.prefill_request(body), timeout=60.0).json()
    params = kv_handover.params_of(answer)
    assert params is not None, answer
    return kv_handover.decode_request(body, params)


async def _is_told_of_lost_kv(url: str, body: dict[str, Any]) -> None:
    """vLLM says that it cannot pull in one of the ways that the proxying Frontend knows."""
    async with httpx.AsyncClient(timeout=120.0) as client:
        answer = await client.post(url, json=body)
    assert "Internal server error" in answer.text, answer.text
    assert has_error_event(answer.content) if body["stream"] else answer.status_code == 500
