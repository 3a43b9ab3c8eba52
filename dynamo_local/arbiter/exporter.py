"""Serves the arbiter's `/metrics` for Prometheus.

Counters go up when events happen. Gauges are computed at each scrape. The exporter runs on the arbiter's event loop, so
it reads the fleet and the GPU ledger without locks. A scrape takes some hundred microseconds of the loop.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.metrics import (
    CONTENT_TYPE,
    ArbiterMetrics,
    GpuSeconds,
    Now,
    gpus_by_state,
    gpus_held,
    residue_by_component,
)
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.degraded import READY, lacking, shown_state
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.secrets import parse_source
from dynamo_local.system.key_files import ApiKeys

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from dynamo_local.components.openai.server import HttpServer, PrivateServer

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
PORT_OPTION = "Host.metrics-port"
KEY_OPTION = "Host.metrics-api-key"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the metrics are served: a port of loopback (0: any free one), or a `socket` of this user.

    With `api_key`, a source of keys, a scrape must show one of them.
    """

    port: int = 0
    socket: Path | None = None
    api_key: str | None = None


class Exporter:
    """Serves from `start` to `stop`. `url` is None at other times. `components` and `state` are the graph's."""

    def __init__(
        self,
        controller: FleetController,
        sampling: Sampling,
        clock: Clock,
        *,
        components: Iterable[str],
        state: Callable[[], str],
        tasks: Tasks,
        place: Place | None = None,
    ) -> None:
        self._controller = controller
        self._sampling = sampling
        self._clock = clock
        self._state = state
        self._tasks = tasks
        self._place = place or Place()
        self._gpu_seconds = GpuSeconds()
        self._server: HttpServer | PrivateServer | None = None
        self._private: PrivateServer | None = None
        self.metrics = ArbiterMetrics(self.now, components)
        controller.subscribe(on_transition=self.metrics.on_transition, on_fleet=self._on_fleet)

    def _on_fleet(self, fleet: Fleet) -> None:
        self._gpu_seconds.settle(self._clock.now_s(), gpus_held(fleet.workers.values()))

    def gpu_hours(self, components: Iterable[str]) -> float | None:
        """Hours that the workers of these components have held GPUs so far; None if they have held none."""
        self._on_fleet(self._controller.fleet)
        totals = self._gpu_seconds.totals()
        held_s = [totals[component] for component in components if component in totals]
        return sum(held_s) / 3600 if held_s else None

    async def start(self) -> None:
        """Raises `ConfigError` if port, socket or keys are not available."""
        from dynamo_local.components.openai.access import ApiKeyMiddleware
        from dynamo_local.components.openai.server import HttpServer, PrivateServer, bind_socket

        place, app = self._place, metrics_app(self.metrics.exposition)
        if place.api_key is not None:
            source = parse_source(place.api_key)
            keys = ApiKeys.load(source, os.environ, option=KEY_OPTION)
            app = ApiKeyMiddleware(app, keys)
            if source.kind == "file":
                self._tasks.keep("API keys", keys.follow)
        server: HttpServer | PrivateServer
        if place.socket is not None:
            server = self._private = PrivateServer(app, place.socket)
        else:
            server = HttpServer(app, bind_socket(LOOPBACK, place.port, option=PORT_OPTION), idle=True)
        self._server = server
        await server.start()

    async def stop(self) -> None:
        """Does nothing if `start` was not called, or failed."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    @property
    def socket_files(self) -> tuple[Path, ...]:
        return () if self._private is None else self._private.socket_files

    async def renew_sockets(self) -> None:
        if self._private is not None:
            await self._private.renew_sockets()

    @property
    def url(self) -> str | None:
        """`http://127.0.0.1:40123/metrics`, or `unix:///run/user/1000/dynamo/dynamo/metrics.sock`."""
        url = None if self._server is None else self._server.url
        return url if url is None or self._place.socket is not None else url + PATH

    def now(self) -> Now:
        """The values of the gauges at this moment."""
        fleet = self._controller.fleet
        self._on_fleet(fleet)
        workers = fleet.workers.values()
        queue = self._sampling.queue.as_json()
        return Now(
            state=shown_state(self._state(), fleet),
            lacking=frozenset(lack.component for lack in lacking(fleet)) if self._state() == READY else frozenset(),
            workers=Counter((worker.component, worker.state) for worker in workers),
            gpus=gpus_by_state(fleet.gpus),
            residue=residue_by_component(fleet),
            gpu_seconds=self._gpu_seconds.totals(),
            queue={of: count for of, count in queue.items() if count is not None},
            task_deaths={name: task.deaths for name, task in self._tasks.kept.items()},
        )


def metrics_app(exposition: Callable[[], bytes]) -> Any:
    """An ASGI application of one page."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found, read = scope["path"] == PATH, scope["method"] in ("GET", "HEAD")
        status = 404 if not found else 200 if read else 405
        body = exposition() if status == 200 else f"there is only GET {PATH}\n".encode()
        kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app
