"""A server as `vllm serve` is one, in this process (`tests/tools/openai_server.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynamo_local.components.openai.server import HttpServer, bind_socket
from tests.tools.openai_server import Server, make_app


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Its state; it listens on `server.port`."""
    state = Server(token_s=0.001)
    sock = bind_socket("127.0.0.1", 0)
    state.port = sock.getsockname()[1]
    http = HttpServer(make_app(state), sock)
    await http.start()
    try:
        yield state
    finally:
        await http.stop()
