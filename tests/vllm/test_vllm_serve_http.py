"""Plain `vllm serve` behind `runtime: http`, on vLLM's CPU build: requests, load, a client that leaves, a drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.scaled import ascale, names
from tests.fakes.served import Served, auntil
from tests.vllm.asking import Streaming, complete, complete_all, prompts
from tests.vllm.hosts import START_TIMEOUT_S, VllmHost

pytestmark = [pytest.mark.vllm, pytest.mark.infra, pytest.mark.timeout(1500)]

TOKENS = 16
LONG_TOKENS = 400
LEAVE_S = 60.0


def words(args: dict[str, Any]) -> list[str]:
    """vLLM's options as words of its command line."""
    found: list[str] = []
    for name, value in args.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", str(value)]
    return found


def served(host: VllmHost, folder: Path, workers: int) -> Served:
    """So many `vllm serve`, one thread each."""
    command = ["vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port:http}"]
    config = {
        "Host": {"gpus": host.gpus},
        "Server": {
            "command": [*command, "--served-model-name", "tiny", *words(dict(host.args))],
            "runtime": "http",
            "role": "aggregated",
            "model": str(host.model),
            "ServiceArgs": {"workers": workers},
        },
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    deadline = ("--start-deadline", str(START_TIMEOUT_S))
    return Served(*deadline, target=("-f", str(file)), env=host.env, timeout_s=START_TIMEOUT_S)


async def test_vllm_serve_answers_and_drains(vllm_host: VllmHost, tmp_path: Path) -> None:
    """Both servers say the same to a prompt; a drain lets long streams end, also after a client went away."""
    with served(vllm_host, tmp_path, 2) as graph:
        graph.start()
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
