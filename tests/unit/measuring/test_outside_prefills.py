"""Streams of a server behind prefill workers: all of them have to decode at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.measuring.repetition import Server

PREFILL_S, TOKEN_S = 0.2, 0.005
ASKED = {"prompts": 4, "tokens": 8, "passes": 4, "answer_max": 20, "seed": 1}
"""The four prefills take eight tenths of a second, an answer one."""


class Prefiller:
    """An OpenAI server whose prompts are computed one after the other, each only once."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()
        self.one = asyncio.Lock()

    async def models(self, request: Request) -> Response:
        """One."""
        return JSONResponse({"object": "list", "data": [{"id": "m"}]})

    async def completions(self, request: Request) -> Response:
        """A frame for each token."""
        asked = await request.json()
        return StreamingResponse(self.tokens(tuple(asked["prompt"]), asked["max_tokens"]))

    async def tokens(self, prompt: tuple[int, ...], count: int) -> AsyncIterator[bytes]:
        """After its prefill."""
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
