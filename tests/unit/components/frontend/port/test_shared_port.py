"""Several Frontends on one port, in one process: who takes connections, who refuses, what /metrics says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import port as shared
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.generation import FrontendDeps
from dynamo_local.components.openai.port import Serving
from dynamo_local.errors import ConfigError
from tests.fakes.data_plane.processor import FakeEndpoint, answer, last, text
from tests.unit.components.frontend.test_frontend_service import FakeContext

ASK = {"model": "m", "prompt": "Hi"}


class One:
    """A Frontend among its siblings; `asked` is how often its Processor was called."""

    def __init__(self, folder: Path, name: str, *script: Any, **settings: Any) -> None:
        self.context = FakeContext(**settings)
        self.context.watcher_name, self.context.siblings_folder = name, folder
        self.endpoint = FakeEndpoint(*(script or (answer("plain"),)))
        self._serving = Serving()
        self._drain: asyncio.Task[None] | None = None

    async def start(self, *, ready: bool = True) -> One:
        context: Any = self.context
        port = await self._serving.open(context, context.settings)
        deps = FrontendDeps(
            chat=self.endpoint,
            completions=self.endpoint,
            models=ModelsView("dynamo"),
            settings=context.settings,
            metrics=port.metrics,
            draining=port.refusing,
            page=port.page,
        )
        await self._serving.start(context, deps, create_app(deps))
        async with asyncio.timeout(5):
            while not deps.models.models():
                await asyncio.sleep(0.01)
        if ready:
            await self.be_ready()
        return self

    async def be_ready(self) -> None:
        (callback,) = self.context.ready_callbacks
        await callback()

    def drain(self) -> asyncio.Task[None]:
        """As its worker process does; it ends when it may go."""
        (callback,) = self.context.callbacks
        return asyncio.ensure_future(callback())

    async def resume(self) -> None:
        (callback,) = self.context.resume_callbacks
        await callback()

    async def stop(self) -> None:
        await self._serving.stop()

    @property
    def url(self) -> str:
        return self.context.announced["frontend_url"]

    @property
    def asked(self) -> int:
        return len(self.endpoint.payloads)


Make = Callable[..., One]


@pytest.fixture
async def frontend(short_folder: Path) -> AsyncIterator[Make]:
    """`frontend(name, *script, **settings)`; they are stopped at the end."""
    made: list[One] = []

    def make(name: str, *script: Any, **settings: Any) -> One:
        made.append(One(short_folder / "of-Frontend", name, *script, **settings))
        return made[-1]

    yield make
    for each in made:
        await each.stop()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=5.0, verify=False) as http:  # certificates take 50 ms
        yield http


async def ask(url: str) -> int:
    """The status of one request on a connection of its own."""
    async with client(url) as http:
        return (await http.post("/v1/completions", json=ASK)).status_code


async def test_they_have_one_port_and_both_take_requests(frontend: Make):
    a, b = await frontend("a").start(), await frontend("b").start()
    assert a.url == b.url
    assert set(await asyncio.gather(*(ask(a.url) for _ in range(60)))) == {200}
    assert a.asked + b.asked == 60
    assert min(a.asked, b.asked) > 5, "the burst is parted"


async def test_one_that_starts_leaves_requests_to_those_that_serve(frontend: Make):
    a = await frontend("a").start(ready=False)
    assert await ask(a.url) == 200
    await a.be_ready()
    b = await frontend("b").start(ready=False)
    await asyncio.sleep(2 * shared.LOOK_EVERY_S)
    assert set(await asyncio.gather(*(ask(a.url) for _ in range(20)))) == {200}
    assert b.asked == 0


async def test_one_that_leaves_loses_no_request(frontend: Make):
    """Its streams end, a connection that its client has kept is answered once more and told to go, what is new goes to
    the others; nobody sees a 503."""
    gate = asyncio.Event()
    a = await frontend("a", [[text("a")], gate, [last()]], answer("kept")).start()
    async with client(a.url) as kept, client(a.url) as streaming:
        assert (await kept.get("/live")).status_code == 200
        running = asyncio.ensure_future(streaming.post("/v1/completions", json=ASK))
        await a.endpoint.called.wait()
        b = await frontend("b").start()
        leaving = a.drain()
        async with asyncio.timeout(5):
            while (answered := await kept.get("/health")).headers.get("connection") != "close":
                await asyncio.sleep(0.01)
        assert answered.status_code == 200
        assert set(await asyncio.gather(*(ask(a.url) for _ in range(20)))) == {200}
        assert (a.asked, b.asked) == (1, 20)
        assert not leaving.done()
        gate.set()
        assert (await running).status_code == 200
        await leaving
    await a.stop()
    assert await ask(b.url) == 200


async def test_a_request_on_a_kept_connection_is_served_while_it_leaves(frontend: Make):
    a = await frontend("a").start()
    async with client(a.url) as kept:
        assert (await kept.post("/v1/completions", json=ASK)).status_code == 200
        b = await frontend("b").start()
        leaving = a.drain()
        await asyncio.sleep(0)
        connections = []
        while not leaving.done():
            found = await kept.post("/v1/completions", json=ASK)
            assert found.status_code == 200
            connections.append(found.headers.get("connection"))
        await leaving
        assert connections.count("close") >= 1
        assert (await kept.post("/v1/completions", json=ASK)).status_code == 200
        assert b.asked >= 1


async def test_where_nobody_else_serves_it_refuses(frontend: Make):
    """503 with Retry-After, as with one Frontend; a drain that is taken back takes that back. The last of several that
    leave at once answers until it goes."""
    a, b = await frontend("a").start(), await frontend("b", answer("plain"), answer("plain")).start()
    both = asyncio.gather(a.drain(), b.drain())
    async with asyncio.timeout(5):
        while await ask(a.url) != 503:
            await asyncio.sleep(0.01)
    await both
    await a.stop()
    assert await ask(b.url) == 503
    await b.resume()
    assert await ask(b.url) == 200


async def test_another_port_is_not_theirs(frontend: Make):
    a = await frontend("a").start()
    port = int(a.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use"):
        await frontend("b", port=port).start()
    c = await frontend("c", port=0, host="127.0.0.2").start()
    assert c.url != a.url


async def test_metrics_are_the_sum_and_never_fall(frontend: Make):

    async def started(one: One) -> float:
        async with client(one.url) as http:
            page = (await http.get("/metrics")).text
        (line,) = [line for line in page.splitlines() if line.startswith("dynamo_frontend_requests_started_total{")]
        return float(line.rpartition(" ")[2])

    a, b = await frontend("a").start(), await frontend("b").start()
    for _ in range(10):
        assert await ask(a.url) == 200
    assert {await started(a) for _ in range(8)} == {10.0}
    await a.drain()
    await a.stop()
    assert await started(b) == 10.0
    again = await frontend("a").start()
    assert await ask(b.url) == 200
    assert {await started(b) for _ in range(8)} == {11.0}
    assert again.url == b.url
