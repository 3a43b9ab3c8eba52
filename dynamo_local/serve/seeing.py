"""What can be seen of a run, composed: `/metrics`, counted where things happen, read when asked; TensorBoard.

It shares the arbiter's loop: a scrape is some hundred microseconds of it, and reads what the loop alone changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.clock import Clock
from dynamo_local.config import PlannerConfig
from dynamo_local.serve.fleet import Fleet
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.metrics import CONTENT_TYPE, ArbiterMetrics, GpuSeconds, Now, gpus_by_state, gpus_held
from dynamo_local.serve.planner_views import Board, PlannerMetrics, PlannerNow
from dynamo_local.serve.planning import Planning
from dynamo_local.serve.sampling import Sampling

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from dynamo_local.components.openai.server import HttpServer

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
PORT_OPTION = "Host.metrics-port"


class Seeing:
    """From `start` to `stop`; `url` is None outside. `components` and the `state` are the graph's."""

    def __init__(
        self,
        fleet: Fleet,
        pool: GpuPool,
        sampling: Sampling,
        clock: Clock,
        *,
        components: Iterable[str],
        state: Callable[[], str],
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._sampling = sampling
        self._clock = clock
        self._state = state
        self._gpu_seconds = GpuSeconds()
        self._server: HttpServer | None = None
        self.metrics = ArbiterMetrics(self.now, components)
        fleet.on_event = self.metrics.on_event
        fleet.on_change = self._settle

    def watch(self, planning: Planning, base: Path, logs: Path, tell: Callable[[str], None]) -> None:
        """Let TensorBoard and `/metrics` look on while that planner plans. See `Board`."""
        board = Board(base, logs, self._clock, tell)

        async def open_board(options: PlannerConfig) -> None:
            await board.open(options.log_dir)

        def now() -> PlannerNow:
            return PlannerNow(planning.state, planning.counts, board.dropped)

        planning.observers += [board, PlannerMetrics(self.metrics.registry, now)]
        planning.before_start, planning.after_stop = open_board, board.close
        planning.onlookers_say = lambda: {"tensorboard": None if board.folder is None else str(board.folder)}

    async def start(self, port: int) -> None:
        """Listen on loopback; 0 takes any free port. Raises `ConfigError` where the port cannot be had."""
        from dynamo_local.components.openai.server import HttpServer, bind_socket

        sock = bind_socket(LOOPBACK, port, option=PORT_OPTION)
        server = HttpServer(metrics_app(self.metrics.exposition), sock, idle=True)
        self._server = server
        await server.start()

    async def stop(self) -> None:
        """Listen no more. Does nothing where `start` was not called, or has failed."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    @property
    def url(self) -> str | None:
        """`http://127.0.0.1:40123/metrics`."""
        return None if self._server is None else self._server.url + PATH

    def now(self) -> Now:
        """What the gauges are made of, at this moment."""
        self._settle()
        workers = self._fleet.workers.values()
        queue = self._sampling.queue.as_json()
        return Now(
            state=self._state(),
            workers=Counter((worker.plan.component, worker.state) for worker in workers),
            gpus=gpus_by_state(self._pool.ledger.snapshot()),
            gpu_seconds=self._gpu_seconds.totals(),
            queue={of: count for of, count in queue.items() if count is not None},
        )

    def _settle(self) -> None:
        self._gpu_seconds.settle(self._clock.now_s(), gpus_held(self._fleet.workers.values()))


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
