"""A runtime folder that is removed while its arbiter lives: what lay in it is made again, by the real arbiter."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dynamo_local.arbiter.exporter import metrics_app
from dynamo_local.arbiter.runtime_folder import RuntimeFolder
from dynamo_local.arbiter.servers import EmbeddedServers, NatsSpec, ServerBinary, prepare
from dynamo_local.circus_plugins.arbiter import DynamoArbiter
from dynamo_local.cli.common import ask_arbiter
from dynamo_local.clock import AsyncioClock
from dynamo_local.components.openai.server import PrivateServer
from dynamo_local.system.host_errors import HostRefused
from dynamo_local.system.paths import Paths
from tests.drivers.served import auntil

TOKEN = "0123456789abcdef"


class Kept:
    """An arbiter, a NATS that runs as far as it knows, and what keeps their folder."""

    def __init__(self, folder: Path) -> None:
        self.paths = Paths("ns", folder / "dynamo" / "ns", folder / "state" / "ns.json", folder / "logs")
        self.paths.prepare()
        pub = f"ipc://{self.paths.events_socket}"
        self.arbiter = DynamoArbiter(endpoint=self.paths.circus_endpoint, pubsub_endpoint=pub)
        servers = EmbeddedServers(
            self.arbiter,
            self.paths,
            AsyncioClock(),
            lambda _: {},
            on_change=self._nothing,
            on_event=lambda event: None,
        )
        self.nats = NatsSpec(
            ServerBinary("nats-server", Path("/x"), "PATH", None), self.paths.runtime / "nats", 1, TOKEN, None
        )
        prepare(self.nats)
        servers.adopt("ns_nats", self.nats, pid=1)
        self.told: list[str] = []
        self.api = PrivateServer(metrics_app(lambda: b"1"), self.paths.planner_socket)
        self.folder = RuntimeFolder(self.paths, [self.arbiter, self.api], servers, AsyncioClock(), self.told.append)

    async def _nothing(self) -> None:
        """There is no statefile to write."""

    async def answers(self) -> bool:
        """As `dynamo ctl` asks, and as who uses the socket of an HTTP server."""
        asked = await asyncio.to_thread(ask_arbiter, self.paths, "numwatchers")
        transport = httpx.AsyncHTTPTransport(uds=str(self.paths.planner_socket))
        async with httpx.AsyncClient(transport=transport) as http:
            page = await http.get("http://arbiter/metrics")
        return (asked["status"], page.status_code, self._mode()) == ("ok", 200, 0o600)

    def _mode(self) -> int:
        return self.paths.planner_socket.stat().st_mode & 0o777


@pytest.fixture
async def kept(short_folder: Path) -> AsyncIterator[Kept]:
    kept = Kept(short_folder)
    await kept.arbiter.start()
    await kept.api.start()
    yield kept
    await kept.api.stop()
    await kept.arbiter.close()


async def test_nothing_is_done_while_nothing_is_missing(kept: Kept) -> None:
    sockets = (*kept.arbiter.socket_files, *kept.api.socket_files)
    before = {path: path.stat().st_ino for path in sockets}
    await kept.folder.look()
    assert {path: path.stat().st_ino for path in sockets} == before
    assert kept.told == []


@pytest.mark.parametrize("times", [1, 3])
async def test_a_removed_folder_is_made_again_with_sockets_and_tokens(kept: Kept, times: int) -> None:
    for _ in range(times):
        shutil.rmtree(kept.paths.runtime.parent)
        await kept.folder.look()
        assert await kept.answers()
    assert kept.nats.token_file.read_text() == f"{TOKEN}\n"
    assert kept.nats.token_file.stat().st_mode & 0o777 == 0o600
    assert kept.told == [f"{kept.paths.runtime} was removed while the run goes on; made again"] * times


async def test_a_removed_socket_is_bound_again(kept: Kept) -> None:
    token = kept.nats.token_file.stat().st_ino
    kept.paths.control_socket.unlink()
    await kept.folder.look()
    assert await kept.answers()
    kept.paths.planner_socket.unlink()
    await kept.folder.look()
    assert await kept.answers()
    assert kept.nats.token_file.stat().st_ino == token


async def test_what_cannot_be_made_is_told_once_and_tried_again(kept: Kept) -> None:
    shutil.rmtree(kept.paths.runtime.parent)
    kept.paths.runtime.parent.write_text("in the way")
    with pytest.raises(HostRefused, match="a folder of ours cannot be made"):
        await kept.folder.look()
    task = asyncio.ensure_future(kept.folder.run())
    try:
        await auntil(lambda: kept.told)
        kept.paths.runtime.parent.unlink()
        await auntil(kept.paths.control_socket.exists)
        assert await kept.answers()
        assert kept.told[0].startswith(f"what is missing of {kept.paths.runtime} cannot be made again: ")
        await auntil(lambda: len(kept.told) == 2, what=lambda: kept.told)
    finally:
        task.cancel()
        await asyncio.wait({task})
