"""Tests what a probe says of a server that it could not use."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.errors import EtcdUnavailable
from dynamo_local.transport.probes import probe_etcd


async def test_a_last_attempt_that_was_cut_short_hides_no_reason() -> None:
    """A server that speaks TLS closes; the attempt that met the deadline only knew that nothing had come yet."""
    seen = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await reader.readuntil(b"\r\n\r\n")
        if seen > 1:
            await reader.read()  # until the prober gives up
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EtcdUnavailable, match=rf"write its address as https://127\.0\.0\.1:{port}"):
            await probe_etcd(f"http://127.0.0.1:{port}", 0.2)
    assert seen > 1
