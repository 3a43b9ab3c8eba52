"""Tests what is to be measured, from a configuration with commands: how its graph is started, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.errors import BadInput
from dynamo_local.measuring.certification import mixed_trace, slower_over
from dynamo_local.measuring.repetition import Server
from dynamo_local.measuring.target import AGG, DECODE, PREFILL, Target, understood
from dynamo_local.profile.document import PathFacts
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.points import Limits
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.options import FleetShape

COMMAND = "python -c pass --port {port:http} --max-num-seqs 8"


def target(folder: Path, **sections: dict[str, object]) -> Target:
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump({"Host": {"gpus": "sim:8"}, **sections}))
    return understood(None, file, (), "profile", None, None)


def test_http_servers_are_started_as_they_are_behind_a_frontend_of_any_port(tmp_path):
    """They have no options of our workers; their words are known, and a model that they do not list."""
    server = {"command": COMMAND, "runtime": "http", "role": "aggregated", "served-model-name": "m", "metrics": None}
    found = target(tmp_path, Server=server)
    assert (found.components, found.runtime_of("Server")) == ({AGG: "Server"}, "http")
    assert not any(word.startswith("--Server.") for word in found.serve_words())
    assert "--Frontend.port=0" in found.serve_words()
    assert "--max-num-seqs" in found.words_of("Server")
    assert (found.model_of("Server"), found.metrics_of("Server")) == ("m", None)
    assert found.engines[AGG] == {"engine": "http", "gpus": 0, "options": {"command": COMMAND}}


def test_of_dynamos_workers_there_is_one_of_each_role_behind_its_own_frontend(tmp_path):
    """Which is asked for them: with two of a role nobody would know who answered."""
    command = "python -c pass"
    found = target(
        tmp_path,
        Front={"command": command, "runtime": "dynamo-1x", "role": "frontend", "ports": {"http": 8000}},
        D={"command": command, "runtime": "dynamo-1x", "role": "decode", "ServiceArgs": {"workers": 3}},
        P={"command": command, "runtime": "dynamo-1x", "role": "prefill"},
    )
    assert found.components == {PREFILL: "P", DECODE: "D"}
    words = found.serve_words()
    assert {"--Front.ports.http=0", "--D.ServiceArgs.workers=1", "--P.ServiceArgs.workers=1"} <= set(words)
    assert found.model_of("D") is None
    assert found.metrics_of("D") == "/metrics"


def test_a_command_that_nobody_knows_how_to_ask_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"Thing is a command of the runtime none.*give it the runtime http"):
        target(tmp_path, Thing={"command": "python -c pass", "role": "decode"})


# --- outside prefills
# Streams of a server behind prefill workers: all of them have to decode at the same time.

PREFILL_S, TOKEN_S = 0.2, 0.005
ASKED = {"prompts": 4, "tokens": 8, "passes": 4, "answer_max": 20, "seed": 1}
"""The four prefills take eight tenths of a second, an answer one."""


class Prefiller:
    """An OpenAI server whose prompts are computed one after the other, each only once."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()
        self.one = asyncio.Lock()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m"}]})

    async def completions(self, request: Request) -> Response:
        """A frame for each token."""
        asked = await request.json()
        return StreamingResponse(self.tokens(tuple(asked["prompt"]), asked["max_tokens"]))

    async def tokens(self, prompt: tuple[int, ...], count: int) -> AsyncIterator[bytes]:
        async with self.one:
            if prompt not in self.known:
                await asyncio.sleep(PREFILL_S)
                self.known.add(prompt)
        for _ in range(count):
            yield b'data: {"choices": []}\n\n'
            await asyncio.sleep(TOKEN_S)


@asynccontextmanager
async def measured(*, apart: bool) -> AsyncIterator[Server]:
    """Of a new one."""
    made = Prefiller()
    routes = [
        Route("/v1/models", made.models),
        Route("/v1/completions", made.completions, methods=["POST"]),
    ]
    listening = bind_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    http = HttpServer(Starlette(routes=routes), listening, tls=None)
    await http.start()
    server = Server(f"http://127.0.0.1:{port}", apart=apart)
    try:
        yield server
    finally:
        await server.close()
        await http.stop()


async def test_prompts_that_others_prefill_are_asked_before():
    """From a cache they come together; the first of them would have ended before the last began."""
    async with measured(apart=False) as server:
        assert (await server.measure(ASKED, 10.0))["itl_s"] is None
    async with measured(apart=True) as server:
        assert (await server.measure(ASKED, 10.0))["itl_s"] >= 0.9 * TOKEN_S


# --- checking
# The mixed trace that a fresh profile is checked by.


def path(*rows: tuple[float | None, float | None]) -> list[PathFacts]:
    """Of (gap over HTTP, gap at the engine)."""
    return [
        PathFacts(tokens=100, ttft_ms=20.0, engine_ttft_ms=10.0, itl_ms=itl_ms, engine_itl_ms=engine_ms)
        for itl_ms, engine_ms in rows
    ]


def test_a_host_that_feeds_its_engines_late_gets_fewer_requests():
    """vLLM's CPU build on two busy cores: passes of 9 ms, a token each 25 ms over HTTP; at half of what the passes
    could do requests were lost, and the trace said nothing."""
    slower = slower_over(path((22.4, 8.8), (24.5, 9.0), (27.7, 10.3)))
    assert slower == pytest.approx(2.69, abs=0.01)
    of = (ProfileModel.load(DEFAULT_PROFILE), Limits(9600, 4096, 2), FleetShape(0, 1), 600.0, 0)
    assert len(mixed_trace(*of, slower)) == pytest.approx(len(mixed_trace(*of)) / slower, rel=0.1)


def test_a_quiet_host_is_half_busy_as_the_profile_says():
    """HTTP adds to the first token, hardly to the gaps; and what was not measured says nothing."""
    assert slower_over(path((9.9, 10.0), (10.1, 10.0), (9.8, 10.0))) == 1.0
    assert slower_over(path((None, 10.0))) == 1.0
    assert slower_over([]) == 1.0
