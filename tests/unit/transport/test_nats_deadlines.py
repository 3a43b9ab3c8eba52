"""A first connect and a close end at their deadlines, whatever nats-py does with a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from nats.aio.client import Client

from dynamo_local.errors import NatsUnavailable
from dynamo_local.transport.nats import close_quietly, connect_nats


async def stubborn(*_args: Any, **_options: Any) -> None:
    """Lets two cancellations pass, as nats-py does with one that comes while a handshake fails."""
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    await asyncio.Event().wait()


async def test_a_connect_that_lets_a_cancellation_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "connect", stubborn)
    async with asyncio.timeout(10.0):
        with pytest.raises(NatsUnavailable, match="did not answer"):
            await connect_nats("nats://127.0.0.1:1", timeout_s=0.05)


async def test_a_close_that_lets_a_cancellation_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "close", stubborn)
    async with asyncio.timeout(10.0):
        await close_quietly(Client(), timeout_s=0.05)


async def test_who_is_cancelled_while_he_connects_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "connect", stubborn)
    before = asyncio.all_tasks()
    connecting = asyncio.ensure_future(connect_nats("nats://127.0.0.1:1"))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == before
