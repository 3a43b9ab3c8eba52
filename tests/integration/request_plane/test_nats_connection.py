"""The connection helper against a real NATS server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import ConnectionClosedError

from dynamo_local.errors import ConfigError, NatsUnavailable
from dynamo_local.system.host_leases import PortLease
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.nats import close_quietly, connect_nats, flush, show_url
from tests.drivers.servers import RealNats

pytestmark = pytest.mark.infra


async def echo_roundtrip(client: Client) -> bytes:
    async def answer(message: object) -> None:
        await message.respond(b"back")  # type: ignore[attr-defined]

    subscription = await client.subscribe("echo", cb=answer)
    try:
        return (await client.request("echo", b"", timeout=5)).data
    finally:
        await subscription.unsubscribe()


async def test_connects_with_the_token_file(nats_server: RealNats) -> None:
    client = await connect_nats(nats_server.url, nats_server.access, name="test")
    assert await echo_roundtrip(client) == b"back"
    await close_quietly(client)
    await close_quietly(client)
    assert client.is_closed


async def test_connects_with_the_token_in_the_url(nats_server: RealNats) -> None:
    host = nats_server.url.removeprefix("nats://")
    client = await connect_nats(f"nats://{nats_server.token}@{host}")
    assert await echo_roundtrip(client) == b"back"
    await close_quietly(client)


async def test_the_first_connect_has_a_deadline() -> None:
    with PortLease() as nobody, pytest.raises(NatsUnavailable) as caught:
        await connect_nats(f"nats://127.0.0.1:{nobody.port}", timeout_s=0.2)
    assert f"0.2 s at nats://127.0.0.1:{nobody.port} (Connection refused)" in str(caught.value)


async def test_a_silent_server_is_given_up_at_the_deadline(own_nats: RealNats) -> None:
    own_nats.pause()
    with pytest.raises(NatsUnavailable, match=r"0\.2 s"):
        await connect_nats(own_nats.url, own_nats.access, timeout_s=0.2)


async def test_refused_credentials_fail_at_once(nats_server: RealNats, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    host = nats_server.url.removeprefix("nats://")
    async with asyncio.timeout(5):
        with pytest.raises(NatsUnavailable, match="refused our credentials") as caught:
            await connect_nats(f"nats://wrong-secret@{host}", timeout_s=60)
        with pytest.raises(NatsUnavailable, match="refused our credentials"):
            await connect_nats(nats_server.url, timeout_s=60)
    assert "wrong-secret" not in str(caught.value) + caplog.text


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("missing", "empty"):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            NatsAccess.of({"DYN_NATS_TOKEN_FILE": str(tmp_path / name)})


@pytest.mark.timing
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_reconnects_after_a_restart(own_nats: RealNats, how: str) -> None:
    client = await connect_nats(own_nats.url, own_nats.access)
    try:
        await (own_nats.stop() if how == "stop" else own_nats.kill())
        while client.is_connected:
            await asyncio.sleep(0.005)
        await own_nats.start()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not client.is_connected:
            await asyncio.sleep(0.005)
        assert loop.time() - began_s < 1.0
        assert await echo_roundtrip(client) == b"back"
    finally:
        await close_quietly(client)


async def test_closing_while_the_server_is_away_is_quick(own_nats: RealNats) -> None:
    ended = asyncio.Event()

    async def on_closed() -> None:
        ended.set()

    client = await connect_nats(own_nats.url, own_nats.access, on_closed=on_closed)
    await own_nats.kill()
    await asyncio.wait_for(close_quietly(client), 1.0)
    assert ended.is_set()
    assert client.is_closed


async def test_a_close_ends_a_flush(own_nats: RealNats) -> None:
    before = asyncio.all_tasks()
    client = await connect_nats(own_nats.url, own_nats.access)
    own_nats.pause()
    flushing = asyncio.ensure_future(client.flush())
    await asyncio.sleep(0)
    await close_quietly(client)
    with pytest.raises(ConnectionClosedError):
        await flushing
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_who_gives_up_a_flush_hears_on(own_nats: RealNats, how: str) -> None:
    """Seen: a flip was cancelled while it waited for a flush. At the late answer nats-py stopped reading for good."""
    client = await connect_nats(own_nats.url, own_nats.access)
    own_nats.pause()
    flushing = asyncio.ensure_future(flush(client))
    if how == "cancelled":
        for _ in range(10):  # until the ping is on its way
            await asyncio.sleep(0)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
    else:
        with pytest.raises(TimeoutError):
            await flushing
    own_nats.resume()
    for _ in range(2):  # what they take the answers of is in order, too
        await flush(client)
        assert await echo_roundtrip(client) == b"back"
    await close_quietly(client)


def test_urls_are_shown_without_credentials() -> None:
    assert show_url("nats://user:pa@ss@127.0.0.1:4222") == "nats://127.0.0.1:4222"
    assert show_url("127.0.0.1:4222") == "nats://127.0.0.1:4222"
