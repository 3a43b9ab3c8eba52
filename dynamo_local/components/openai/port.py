"""A Frontend's port, which its siblings (other workers of its component) have, too.

One listening socket: the first Frontend binds it, and any that is there hands it to the next. So no connection is lost
with the one that leaves: what waits in the kernel's queue is everybody's. (With a socket each, and SO_REUSEPORT, the
kernel resets those that wait at the one that is closed.)

A registered Frontend accepts connections. One that is starting or draining does not, unless no other is registered.
A draining one then answers 503: an answer is better than a connection that nobody takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from dynamo_local.clock import Clock
from dynamo_local.components.http_metrics import PREFIX, HttpMetrics
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import access
from dynamo_local.components.openai.recorder import PageFeed, Recorder, follow_fleet
from dynamo_local.components.openai.route import Activity, HttpDeps
from dynamo_local.components.openai.server import BACKLOG, Acceptor, HttpServer
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.core.gpu_shares import LET_GO
from dynamo_local.errors import ConfigError, StartTimedOut
from dynamo_local.sdk.context import Work, WorkerContext
from dynamo_local.system import fd_messages
from dynamo_local.system.executors import ended
from dynamo_local.system.paths import REQUESTS_SOCKET

# --- The metrics of several processes as one page, on the port that they share.
#
# The process that is scraped adds up what all of them report. A sum must never fall, or `rate()` takes it for a restart
# and counts everything again. So the last report of each process is kept. It counts on when the process is gone, and a
# successor of the same name begins with it.

NOW = frozenset({f"{PREFIX}_inflight_requests", f"{PREFIX}_queued_requests"})
"""Families that say what is, not what was: of a process that is gone they say nothing."""

Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True):
    """One metric: its samples' values by sample name and labels, in the page's order."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, Labels, float]]


Counts = list[Family]


def counts_of(registry: CollectorRegistry) -> Counts:
    """The content of the registry's page."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(sample.name, tuple(sample.labels.items()), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def counts_of_ended(counts: Counts) -> Counts:
    """The counts that stay valid once the process is gone."""
    return [family for family in counts if family.name not in NOW]


def added(many: Iterable[Counts]) -> Counts:
    """The sums."""
    families: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for counts in many:
        for family in counts:
            _, sums = families.setdefault(family.name, (family, {}))
            for name, labels, value in family.samples:
                sums[name, labels] = sums.get((name, labels), 0.0) + value
    return [
        Family(family.name, family.kind, family.text, [(*key, value) for key, value in sums.items()])
        for family, sums in families.values()
    ]


def page(counts: Counts) -> bytes:
    """In the text format."""
    registry = CollectorRegistry()
    registry.register(_Told(counts))
    return generate_latest(registry)


class _Told(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for family in self._counts:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


# --- Workers of one component on this host talk over unix sockets in a folder that they share.
#
# Nobody owns what they have in common. Any worker that is there gives it to one that starts, so that the arbiter, its
# successor and the guardian need not know of it. The folder is private to the user, and goes with the run.

logger = logging.getLogger(__name__)

SUFFIX = ".sock"
ASK_TIMEOUT_S = 0.5
"""A worker that answers takes a millisecond. One that does not answer in this time is hung or stopped, and counts as
absent."""
START_LOCK_S = 20.0
SIBLING_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """`facts` is JSON; `fds` are open descriptors, the asker's own from then on."""

    facts: Any
    fds: Sequence[int] = ()


class Siblings:
    """`name` is this worker's among those in the `folder`, which is made where it is missing."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        # A socket's path has 107 bytes at most, and a run's folder may have as many: this one is short.
        self._fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._short = Path(f"/proc/self/fd/{self._fd}")
        self._acceptor: Acceptor | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def starting_alone(self) -> AsyncIterator[None]:
        """No two of them start within this at once. Raises `StartTimedOut`."""
        lock = FileLock(self.folder / "start.lock", mode=0o600, thread_local=False)
        try:
            await asyncio.to_thread(lock.acquire, timeout=START_LOCK_S, poll_interval=0.01)
        except Timeout:
            raise StartTimedOut(
                f"{self.folder}: another worker has held the start of this component for {START_LOCK_S:g} s"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def answer(self, reply: Callable[[str], Awaitable[Reply]]) -> None:
        """From now on the others get what `reply` says to what they ask. OSError where the socket cannot be had."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = self._short / f"{self.name}{SUFFIX}"
            path.unlink(missing_ok=True)  # of a process that was killed: the name is ours now
            listening.bind(str(path))
            listening.listen(SIBLING_BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self._acceptor = Acceptor(listening)
        self._acceptor.begin(partial(self._taken, reply))

    async def ask(self, what: str) -> dict[str, Reply]:
        """The answer of each of the others, by name. A worker that is gone, or does not answer in time, is left out."""
        try:
            names = [path.stem for path in self._short.iterdir() if path.suffix == SUFFIX and path.stem != self.name]
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.folder, error)
            return {}
        found = await asyncio.gather(*(asyncio.to_thread(self._ask, name, what) for name in names))
        return {name: reply for name, reply in zip(names, found, strict=True) if reply is not None}

    async def close(self) -> None:
        """Answer nothing more."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            (self._short / f"{self.name}{SUFFIX}").unlink(missing_ok=True)
            acceptor.close()
            acceptor.sock.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ask(self, name: str, what: str) -> Reply | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ASK_TIMEOUT_S)
            try:
                connection.connect(str(self._short / f"{name}{SUFFIX}"))
                fd_messages.send(connection, what)
                facts, fds = fd_messages.receive(connection)
            except (OSError, ValueError) as error:
                if not isinstance(error, ConnectionError | FileNotFoundError):
                    logger.warning("%s does not say %r: %s", name, what, error)
                return None
        return Reply(facts, tuple(fds))

    def _taken(self, reply: Callable[[str], Awaitable[Reply]], connection: socket.socket) -> None:
        task = asyncio.create_task(_answered(connection, reply), name="answer to a sibling")
        task.add_done_callback(lambda _: connection.close())  # also if it was cancelled before it began
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answered(connection: socket.socket, reply: Callable[[str], Awaitable[Reply]]) -> None:
    with contextlib.suppress(OSError, TimeoutError):  # who asked has gone: there is nobody to tell
        async with asyncio.timeout(ASK_TIMEOUT_S):
            what = await fd_messages.areceive(connection)
            answer = await reply(str(what))
            await fd_messages.asend(connection, answer.facts, answer.fds)


LOOK_EVERY_S = 0.25
"""While it does not serve itself: how soon it notices that a sibling does, or that none does any more."""
KEPT_S = 1.0
"""After its last answer: connections that clients have kept may bring one more request, which is answered, and the last
of its connection. Those that bring none are idle, and closed."""
NEW_S = 10.0
"""The same for a connection that has had no answer yet. Its client connected to ask, and may be slow."""

SOCKET, SERVES, COUNTS = "socket", "serves", "counts"
"""The questions of siblings."""
FILE = ".counts"


class SharedPort:
    """Between `open` and `close`. `refusing` is set while requests are to be refused: it leaves, and nobody else is
    there."""

    def __init__(self, settings: FrontendConfig, metrics: HttpMetrics, siblings: Siblings | None) -> None:
        self.refusing = asyncio.Event()
        self.metrics = metrics
        self.sock: socket.socket
        self._settings = settings
        self._siblings = siblings
        self._asked = [settings.host, settings.port]
        self._server: HttpServer | None = None
        self._ready = self._leaving = self._covered = self._shared = False
        self._deciding = asyncio.Lock()
        self._changed = asyncio.Event()
        self._before: Counts = []

    # --- coming ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Have the socket: a sibling's, or a new one. Raises `ConfigError`, `StartTimedOut`."""
        if self._siblings is None:
            self.sock = self._bound()
            return
        async with self._siblings.starting_alone():
            sock = await self._handed_over()
            if sock is None:
                sock = self._bound()
            else:
                access.check_reach(sock, self._settings)
            self.sock = sock
            self._before = self._kept(self._siblings.name)
            try:
                self._siblings.answer(self._answer)
            except OSError as error:
                sock.close()
                raise ConfigError(f"Frontend: no socket can be made in {self._siblings.folder}: {error}") from error

    def served_by(self, server: HttpServer) -> None:
        """It has begun to take connections from `sock`."""
        self._server = server
        server.share(self._shared)

    async def follow(self) -> None:
        """Take connections or leave them to others, until cancelled."""
        while True:
            await self._decide()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._serves else LOOK_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()

    async def ready(self) -> None:
        """The worker is registered: it serves."""
        self._ready = True
        await self._decide()

    # --- going, and coming back --------------------------------------------------------------------

    async def leave(self) -> None:
        """It takes nothing new. Returns when that is so."""
        self._leaving = True
        await self._decide()
        self._changed.set()

    async def kept_connections(self) -> None:
        """Return when clients have let go of their connections, or had the time to. At once where all is refused."""
        if self._covered and self._server is not None:
            for wait, bound_s in ((self._server.wait_unconnected, KEPT_S), (self._server.wait_first_answers, NEW_S)):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(bound_s):
                        await wait()

    async def resume(self) -> None:
        """The drain was taken back."""
        self._leaving = False
        await self._decide()

    async def close(self) -> None:
        """Keep what was counted; tell siblings nothing more. The socket is the server's to close."""
        if self._siblings is not None:
            if self._server is not None:
                await self._keep(self._counts())
            await self._siblings.close()

    # --- metrics -----------------------------------------------------------------------------------

    async def page(self) -> bytes:
        """The sum over all workers of the component that this run had."""
        if self._siblings is None:
            return self.metrics.exposition()
        own = self._counts()
        await self._keep(own)
        replies = await self._siblings.ask(COUNTS)
        others = {name: found for name, reply in replies.items() if (found := _counts_in(name, reply)) is not None}
        absent = [self._kept(name) for name in self._names() if name not in others]
        if not others and not absent and not self._before:
            return self.metrics.exposition()
        return page(added((own, *others.values(), *absent)))

    def _counts(self) -> Counts:
        return added((counts_of(self.metrics.registry), self._before))

    async def _keep(self, counts: Counts) -> None:
        """Reported counts must survive if this process is killed."""
        assert self._siblings is not None
        file = self._siblings.folder / f"{self._siblings.name}{FILE}"
        try:
            await asyncio.to_thread(_write, file, msgspec.json.encode(counts_of_ended(counts)))
        except OSError as error:
            logger.warning("%s cannot be written: /metrics will fall when this worker ends: %s", file, error)

    def _kept(self, name: str) -> Counts:
        assert self._siblings is not None
        try:
            raw = (self._siblings.folder / f"{name}{FILE}").read_bytes()
            return msgspec.json.decode(raw, type=Counts)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("what %s has counted cannot be read: %s", name, error)
            return []

    def _names(self) -> Iterator[str]:
        assert self._siblings is not None
        for file in self._siblings.folder.glob(f"*{FILE}"):
            if file.stem != self._siblings.name:
                yield file.stem

    # --- among siblings ------------------------------------------------------------------------------

    @property
    def _serves(self) -> bool:
        return self._ready and not self._leaving

    async def _decide(self) -> None:
        async with self._deciding:
            others = False if self._serves else await self._others_serve()
            self._covered = covered = others and not self._serves
            if self._leaving and not covered:
                self.refusing.set()
            else:
                self.refusing.clear()
            if self._server is not None:
                self._server.take_connections(not covered)
                self._server.answer_last(self._leaving and covered)

    async def _others_serve(self) -> bool:
        if self._siblings is None:
            return False
        replies = await self._siblings.ask(SERVES)
        return any(reply.facts == [*self._asked, True] for reply in replies.values())

    async def _answer(self, what: str) -> Reply:
        if what == COUNTS:
            own = self._counts()
            await self._keep(own)
            return Reply(msgspec.to_builtins(own))
        if what == SOCKET:
            self._shared = True
            if self._server is not None:
                self._server.share(True)
            return Reply(self._asked, (self.sock.fileno(),))
        return Reply([*self._asked, self._serves])

    def _bound(self) -> socket.socket:
        sock = access.listening_socket(self._settings)
        sock.listen(BACKLOG)  # from here on nobody else can have the port
        return sock

    async def _handed_over(self) -> socket.socket | None:
        """The socket of a sibling that was asked for the same address; whatever the port that 0 has come to."""
        assert self._siblings is not None
        found: socket.socket | None = None
        for name, reply in (await self._siblings.ask(SOCKET)).items():
            for fd in reply.fds:
                if found is None and reply.facts == self._asked:
                    found = socket.socket(fileno=fd)
                    self._shared = True
                    logger.info("%s listens there already: its socket is this worker's, too", name)
                else:
                    os.close(fd)
        return found


def _counts_in(name: str, reply: Reply) -> Counts | None:
    try:
        return msgspec.convert(reply.facts, Counts)
    except msgspec.ValidationError as error:  # of another release, after an apply
        logger.warning("what %s counts cannot be read: %s", name, error)
        return None


def _write(file: Path, data: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(data)
    new.replace(file)


# --- An application on a Frontend's port, in a worker process: start, drain and stop.


class Serving:
    """Held by a Frontend's component. `stop` may be called at any time, also after a start that failed."""

    def __init__(self) -> None:
        self._server: HttpServer | None = None
        self._port: SharedPort | None = None
        self._follow: list[asyncio.Task[None]] = []
        self._recorder: Recorder | None = None
        self._page_feed: PageFeed | None = None

    async def open(self, context: WorkerContext, settings: FrontendConfig) -> SharedPort:
        """The port, which siblings may have, too. Raises `ConfigError` where it cannot be had."""
        port = SharedPort(settings, HttpMetrics(settings.targets.seconds), _siblings(context))
        try:
            await port.open()
        except BaseException:
            await port.close()
            raise
        self._port = port
        return port

    def recorder(self, context: WorkerContext, settings: FrontendConfig, clock: Clock) -> Recorder | None:
        """The recorder of requests, if the settings name a file. Raises `ConfigError` if it cannot be written."""
        if settings.record_trace is None:
            return None
        path = Path(settings.record_trace)
        number = context.watcher_name.removeprefix(f"{context.namespace}_{context.component}")  # "", "_1", …
        path = path.with_name(f"{path.stem}{number}{path.suffix}")
        self._recorder = Recorder(path, settings.record_trace_max_bytes, clock, settings.targets)
        following = follow_fleet(self._recorder, context.kv, context.namespace)
        self._follow.append(asyncio.create_task(following, name="recorded-fleet"))
        return self._recorder

    def page_feed(self, context: WorkerContext, settings: FrontendConfig, clock: Clock) -> PageFeed | None:
        """The way to the page's process. None for a worker without a folder on this host."""
        if context.siblings_folder is None:
            return None
        path = context.siblings_folder.parent.parent / REQUESTS_SOCKET
        self._page_feed = PageFeed(path, clock, settings.targets)
        return self._page_feed

    async def start(self, context: WorkerContext, deps: HttpDeps, app: ASGIApp, *more_models: ModelsView) -> None:
        """After `open`: follow the models, listen, announce the URL, and take part in the worker's drain."""
        port = self._port
        assert port is not None
        server = self._server = HttpServer(app, port.sock, tls=access.tls_of(deps.settings), shared=True)
        views = (deps.models, *more_models)
        self._follow += [asyncio.create_task(view.follow(context.kv), name="models-view") for view in views]
        if deps.held is not None:
            context.on_control(LET_GO, deps.held.let_go)
            self._follow.append(asyncio.create_task(deps.held.tell(context), name="held-requests"))
        if deps.keys is not None:
            self._follow.append(asyncio.create_task(deps.keys.follow(), name="api-keys"))
        await server.start()
        port.served_by(server)
        self._follow.append(asyncio.create_task(port.follow(), name="shared-port"))
        context.vital(server.wait_failed(), "the HTTP server")
        context.on_ready(port.ready)
        context.on_resume(port.resume)

        async def drained() -> None:
            # The socket stays open until the shutdown: the drain may be taken back.
            await port.leave()
            await _quiet(deps.activity, port, context.unread_bound_s)

        context.on_drain(drained)
        activity = deps.activity
        context.set_work_source(
            lambda: Work(activity.request_ids, unread_s=activity.unread_s(), abandoned=activity.abandoned)
        )
        context.set_load_source(deps.load)
        if deps.settings.targets.given:
            context.set_dispatch_source(deps.metrics.against_targets)
        context.set_served_source(deps.metrics.served.counters)

        async def counters() -> Mapping[str, float]:
            return deps.metrics.counters()

        context.observe(counters, requests=lambda window_s: deps.metrics.recent.of(window_s, deps.clock.now_s()))
        await context.announce(frontend_url=server.url)
        logger.info("serving OpenAI's API at %s/v1", server.url)

    async def stop(self) -> None:
        """Stop listening, and end the connections that are idle."""
        if self._server is not None:
            await self._server.stop()
        elif self._port is not None:
            self._port.sock.close()
        await ended(*self._follow)
        if self._recorder is not None:
            await self._recorder.close()
        if self._page_feed is not None:
            self._page_feed.close()
        if self._port is not None:
            await self._port.close()


def _siblings(context: WorkerContext) -> Siblings | None:
    """None where this worker cannot have any: its port is its own then."""
    folder = context.siblings_folder
    try:
        return None if folder is None else Siblings(folder, context.watcher_name)
    except OSError as error:
        logger.warning("the port cannot be shared with other workers of this component: %s", error)
        return None


async def _quiet(activity: Activity, port: SharedPort, unread_bound_s: float) -> None:
    """Return when nothing is under way, and connections that clients have kept had their time."""
    ending = asyncio.create_task(activity.end_unread(unread_bound_s), name="unread-answers")
    try:
        await activity.wait_idle()
        await port.kept_connections()
        await activity.wait_idle()
    finally:
        await ended(ending)
