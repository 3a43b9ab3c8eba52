"""KV transfers between simulated engines: what a prefill engine holds, and what a decode engine pulls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import msgspec

from dynamo_local.clock import Clock
from dynamo_local.engines.sim.options import INSTANT_S, SimOptions, logprobs_of
from dynamo_local.engines.sim.requests import Handoff, PullReady
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.engines.sim.tokens import TokenStream
from dynamo_local.errors import DynamoError, KvTransferError, from_wire, to_wire
from dynamo_local.ports import EngineRequest, FinishReason

# --- The side channel of a hand-off: KV moves from the engine that computed it to the engine that needs it.
#
# The puller names the engine, the hand-off, and a digest of the expected prompt. The source checks all three, waits for
# the time of a transfer, frees its blocks and confirms. If the source dies, the connection breaks at once. If it hangs,
# the puller's deadline passes. No KV bytes are sent, because nothing would read them.

_LOOPBACK = "127.0.0.1"
_REQUEST_DEADLINE_S = 5.0
"""A connection that has not sent its first request by then is closed."""
_LINE_BYTES = 64 * 1024
"""The longest line."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """`prompt_digest`: hex digest of the prompt whose KV is expected. `num_tokens`: how many of its tokens to move.
    `unwanted`: none, and the KV may be freed; its request has ended (so vLLM's connector says, too)."""

    engine_id: str
    request_id: str
    prompt_digest: str
    num_tokens: int
    unwanted: bool = False


def pull_request_of(params: Mapping[str, Any], request_id: str, digest: bytes) -> PullRequest:
    """The request in the parameters that a decode engine was given. Raises `KvTransferError` if they are incomplete."""
    wanted = {"remote_engine_id": str, "remote_request_id": str, "remote_host": str, "remote_port": int}
    wrong = [name for name, kind in wanted.items() if not isinstance(params.get(name), kind)]
    if wrong:
        raise KvTransferError(
            f"request {request_id} is to be decoded from a remote prefill, but its kv_transfer_params lack "
            f"{', '.join(wrong)}: hand over what the prefill engine answered with, unchanged"
        )
    return PullRequest(params["remote_engine_id"], params["remote_request_id"], digest.hex(), 0)


class KvSource(Protocol):
    """The engine that holds the KV."""

    async def serve_pull(self, pull: PullRequest) -> None:
        """Return when the transfer is over and the blocks are free. Raises `KvTransferError`.

        Cancelled when the puller goes away: the blocks then stay under their lease.
        """
        ...


class KvListener(Protocol):
    """Where a source can be reached."""

    host: str
    port: int

    async def close(self) -> None: ...


class KvTransport(Protocol):
    """Both ends of the side channel."""

    async def serve(self, source: KvSource) -> KvListener:
        """Let others pull the KV that `source` holds, until the listener is closed."""
        ...

    async def pull(self, host: str, port: int, request: PullRequest) -> None:
        """Return when the KV is here. Raises `KvTransferError`; the caller sets the deadline."""
        ...


class InMemoryTransport:
    """Engines of one process that share this object: for tests and for the virtual clock, where no socket may wait."""

    def __init__(self) -> None:
        self._sources: dict[int, KvSource] = {}
        self._next_port = 1

    async def serve(self, source: KvSource) -> KvListener:
        port, self._next_port = self._next_port, self._next_port + 1
        self._sources[port] = source
        return _MemoryListener(self._sources, port)

    async def pull(self, host: str, port: int, request: PullRequest) -> None:
        source = self._sources.get(port)
        if source is None:
            raise _gone(host, port, request, "nothing listens there")
        await source.serve_pull(request)


class _MemoryListener:
    def __init__(self, sources: dict[int, KvSource], port: int) -> None:
        self._sources, self.host, self.port = sources, "memory", port

    async def close(self) -> None:
        self._sources.pop(self.port, None)


class _Line(msgspec.Struct, omit_defaults=True):
    """The request of a puller, and the answer of the source: a line of JSON each. `number` tells the pulls of one
    connection apart. Without `pull` the puller has gone, and without `error` all went well."""

    number: int = 0
    pull: PullRequest | None = None
    error: dict[str, Any] | None = None


_lines = msgspec.json.Decoder(_Line)


class _Connection(asyncio.Protocol):
    """One end of a connection: bytes in, `_taken` for each whole line."""

    def __init__(self) -> None:
        self._rest = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has the methods without deriving from it

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._taken(line)
        if len(self._rest) > _LINE_BYTES:
            self.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def send(self, line: _Line) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(msgspec.json.encode(line) + b"\n")

    def _taken(self, line: bytes) -> None:
        raise NotImplementedError


class LoopbackTransport:
    """A TCP server on 127.0.0.1 per source, and one connection from each engine that has pulled from it."""

    def __init__(self) -> None:
        self._pull_links: dict[tuple[str, int], _PullLink] = {}

    async def serve(self, source: KvSource) -> KvListener:
        listener = _LoopbackListener(source, self._pull_links)
        await listener.open()
        return listener

    async def pull(self, host: str, port: int, request: PullRequest) -> None:
        try:
            puller = self._pull_links.get((host, port)) or await self._connect(host, port)
            error = await puller.pull(request)
        except OSError as error:
            raise _gone(host, port, request, str(error)) from error
        if error is not None:
            raise from_wire(error)

    async def _connect(self, host: str, port: int) -> _PullLink:
        loop = asyncio.get_running_loop()
        _, puller = await loop.create_connection(lambda: _PullLink(self._pull_links, (host, port)), host, port)
        return puller


class _PullLink(_Connection):
    """The puller's end of the connection to one source. It is in `links` while it lives."""

    def __init__(self, links: dict[tuple[str, int], _PullLink], address: tuple[str, int]) -> None:
        super().__init__()
        self._pull_links = links
        self._address = address
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._numbers = itertools.count(1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._pull_links[self._address] = self

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pull_links.get(self._address) is self:
            del self._pull_links[self._address]
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the connection broke"))

    async def pull(self, request: PullRequest) -> dict[str, Any] | None:
        """The error of the source, None if it went well. OSError if the connection breaks."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the connection broke")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send(_Line(number, request))
        try:
            return await future
        except asyncio.CancelledError:
            self.send(_Line(number))
            raise
        finally:
            del self._waiting[number]
            if self._pull_links.get(self._address) is not self and not self._waiting:  # another has taken its place
                self.transport.close()

    def _taken(self, line: bytes) -> None:
        try:
            answer = _lines.decode(line)
        except msgspec.DecodeError as error:
            logger.warning("what listens at %s:%d is no engine: %s", *self._address, error)
            self.abort()
            return
        future = self._waiting.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer.error)


class _LoopbackListener:
    """Closing it also closes the connections over which its own engine has pulled."""

    def __init__(self, source: KvSource, links: Mapping[tuple[str, int], _PullLink]) -> None:
        self._source = source
        self._pull_links = links
        self._server: asyncio.Server | None = None
        self.connections: set[_SourceLink] = set()
        self.host, self.port = _LOOPBACK, 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _SourceLink(self._source, self.connections), _LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in (*self.connections, *self._pull_links.values()):
            connection.abort()
        await asyncio.gather(*(task for each in self.connections for task in each.tasks), return_exceptions=True)
        # After the connections: wait_closed waits for them since Python 3.12.
        await self._server.wait_closed()


class _SourceLink(_Connection):
    """The source's end of one connection. A pull is a task, which ends if the puller goes away."""

    def __init__(self, source: KvSource, connections: set[_SourceLink]) -> None:
        super().__init__()
        self._source = source
        self._connections = connections
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        return self._serving.values()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(_REQUEST_DEADLINE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._heard()
        for task in self._serving.values():
            task.cancel()

    def _heard(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _taken(self, line: bytes) -> None:
        self._heard()
        try:
            request = _lines.decode(line)
        except msgspec.DecodeError as error:
            self.send(_Line(error=to_wire(KvTransferError(f"not a pull request: {error}"))))
            return
        if request.pull is not None:
            self._serving[request.number] = asyncio.ensure_future(self._serve(request.number, request.pull))
        elif (task := self._serving.get(request.number)) is not None:
            task.cancel()

    async def _serve(self, number: int, pull: PullRequest) -> None:
        error = None
        try:
            await self._source.serve_pull(pull)
        except DynamoError as failure:
            error = to_wire(failure)
        finally:
            del self._serving[number]
        self.send(_Line(number, error=error))


def _gone(host: str, port: int, request: PullRequest, why: str) -> KvTransferError:
    return KvTransferError(
        f"the KV of request {request.request_id} cannot be pulled: engine {request.engine_id} at {host}:{port} "
        f"does not answer ({why}); prefill it again",
        remote_request_id=request.request_id,
    )


# --- The output of one request, for which `generate` waits.


class OutputStream:
    """One request's answer as it comes. `pending` tokens were computed and not yet handed on."""

    __slots__ = (
        "cached",
        "delivered",
        "error",
        "first",
        "handoff",
        "pending",
        "pull",
        "reason",
        "request",
        "tokens",
        "waiter",
    )

    def __init__(self, request: EngineRequest, tokens: TokenStream, pull: PullRequest | None) -> None:
        self.request = request
        self.tokens = tokens
        self.pull = pull
        self.first = 0
        self.delivered = False
        self.pending = 0
        self.cached: int | None = None
        self.reason: FinishReason | None = None
        self.handoff: Handoff | None = None
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def numbers(self, first: int, token_ids: tuple[int, ...]) -> dict[str, Any]:
        """The logprobs of these tokens, and with the first ones those of the prompt, as far as they were asked for."""
        extras, found = self.request.sampling.extras, {}
        if extras is None:
            return {}
        if extras.logprobs is not None:
            found["logprobs"] = logprobs_of(self.tokens, token_ids, first, max(1, extras.logprobs))
        if extras.prompt_logprobs is not None and first == 0:
            prompt = self.request.prompt_token_ids
            rest = logprobs_of(self.tokens, prompt[1:], -len(prompt), max(1, extras.prompt_logprobs))
            found["prompt_logprobs"] = [(), *rest]
        return found

    def wake(self) -> None:
        """Wake `generate`: something has changed."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


logger = logging.getLogger(__name__)

_REMEMBERED_EXPIRIES = 1000
TOLD_S = 1.0


def kv_transfer_params(
    engine_id: str, listener: KvListener | None, handoff: Handoff | None
) -> Mapping[str, Any] | None:
    """The parameters that a prefill returns, in the format of vLLM's NixlConnector, for a decode engine as they are.

    None for a request whose KV is not held, and from an engine that is closed.
    """
    if handoff is None or listener is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": list(handoff.blocks),
        "remote_request_id": handoff.request_id,
        "remote_host": listener.host,
        "remote_port": listener.port,
        "tp_size": 1,
    }


class KvTransfers:
    """Both ends, for one engine (`engines.sim.transfers.KvSource` is the giving one).

    `scheduler()` is None once the engine is closed or dead. `pump` advances its schedule to now, `kick` does so soon,
    `changed` reports that its load has changed.
    """

    def __init__(
        self,
        engine_id: str,
        options: SimOptions,
        clock: Clock,
        transport: KvTransport,
        *,
        scheduler: Callable[[], SimScheduler | None],
        pump: Callable[[], object],
        kick: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._engine_id = engine_id
        self._options = options
        self._clock = clock
        self._transport = transport
        self._scheduler = scheduler
        self._pump = pump
        self._kick = kick
        self._changed = changed
        self._held: dict[str, str] = {}
        self._expired: deque[str] = deque(maxlen=_REMEMBERED_EXPIRIES)
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def tasks(self) -> Iterable[asyncio.Task[None]]:
        """The pulls that are under way."""
        return (*self._pulls.values(), *self._telling)

    async def told(self) -> None:
        """Return when other engines know which of their KV is not wanted, or past `TOLD_S`: a lease frees it then."""
        if self._telling:
            await asyncio.wait(tuple(self._telling), timeout=TOLD_S)

    def forget(self, request_id: str, stream: OutputStream) -> None:
        """Nobody waits for this request any more. KV that it was to pull is not wanted, either."""
        self._held.pop(request_id, None)
        task = self._pulls.pop(request_id, None)
        if task is not None:
            task.cancel()
        if stream.pull is not None and stream.error is None and not stream.first + stream.pending:
            telling = asyncio.get_running_loop().create_task(self._tell_unwanted(stream), name="KV is not wanted")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    # --- giving ------------------------------------------------------------------------------------

    def hold(self, request_id: str, prompt_digest: str) -> None:
        """Keep the KV of this request for another engine, which must know the prompt."""
        self._held[request_id] = prompt_digest

    def expired(self, request_id: str) -> None:
        """The lease ended before anybody pulled the KV."""
        self._held.pop(request_id, None)
        self._expired.append(request_id)
        logger.warning("the KV of request %s was not pulled within its lease", request_id)

    def release(self, params: Mapping[str, Any]) -> None:
        request_id, scheduler = str(params.get("remote_request_id")), self._scheduler()
        if scheduler is not None and self._held.pop(request_id, None) is not None:
            scheduler.release(request_id, self._clock.now_s())
            self._changed()
            self._kick()

    async def serve_pull(self, pull: PullRequest) -> None:
        """Return when the KV has been pulled, and free it. Raises `KvTransferError`."""
        scheduler = self._scheduler()
        if scheduler is None or pull.engine_id != self._engine_id:
            raise KvTransferError(
                f"the KV of request {pull.request_id} is of engine {pull.engine_id}, and this is engine "
                f"{self._engine_id}; prefill it again",
                remote_request_id=pull.request_id,
            )
        self._pump()
        if pull.unwanted:
            self.release({"remote_request_id": pull.request_id})
            return
        digest = self._held.get(pull.request_id)
        if digest is not None and digest != pull.prompt_digest:
            raise KvTransferError(f"the KV of request {pull.request_id} is that of another prompt; nothing was pulled")
        started_s = self._clock.now_s()
        self._pin(scheduler, pull, started_s)
        takes_s = self._options.transfer_s(pull.num_tokens)
        try:
            if takes_s > INSTANT_S:
                await self._clock.sleep_until(started_s + takes_s)
        except asyncio.CancelledError:
            scheduler.unpin(pull.request_id, self._clock.now_s())
            self._kick()
            raise
        if self._scheduler() is not scheduler:
            raise KvTransferError(f"engine {self._engine_id} was closed while the KV of {pull.request_id} was pulled")
        scheduler.release(pull.request_id, self._clock.now_s())
        self._held.pop(pull.request_id, None)
        self._changed()
        self._kick()

    def _pin(self, scheduler: SimScheduler, pull: PullRequest, now_s: float) -> None:
        try:
            scheduler.pin(pull.request_id, now_s)
        except KeyError:
            lease_s = self._options.kv_lease_duration_s
            why = f"its lease of {lease_s:g} s is over" if pull.request_id in self._expired else "it is not held here"
            raise KvTransferError(
                f"the KV of request {pull.request_id} cannot be pulled: {why}; prefill it again",
                remote_request_id=pull.request_id,
            ) from None
        self._kick()

    # --- pulling -----------------------------------------------------------------------------------

    def begin_pull(self, event: PullReady, stream: OutputStream) -> None:
        """The blocks are allocated here: fill them, in the background. A failure becomes the stream's error."""
        self._pulls[event.request_id] = asyncio.get_running_loop().create_task(self._pull(event, stream))

    async def _pull(self, event: PullReady, stream: OutputStream) -> None:
        assert stream.pull is not None
        params = stream.request.kv_transfer_params or {}
        identity = stream.pull
        request = PullRequest(identity.engine_id, identity.request_id, identity.prompt_digest, event.num_tokens)
        try:
            async with asyncio.timeout(self._options.kv_pull_timeout_s):
                await self._transport.pull(params["remote_host"], params["remote_port"], request)
        except TimeoutError:
            stream.error = KvTransferError(
                f"the KV of request {request.request_id} was not pulled within {self._options.kv_pull_timeout_s:g} s",
                remote_request_id=request.request_id,
            )
        except KvTransferError as error:
            stream.error = error
        finally:
            self._pulls.pop(event.request_id, None)
        scheduler = self._scheduler()
        if stream.error is not None:
            # Waking the stream ends it, which frees its blocks.
            stream.wake()
        elif scheduler is not None:
            scheduler.pulled(event.request_id, self._clock.now_s())
            self._kick()

    async def _tell_unwanted(self, stream: OutputStream) -> None:
        assert stream.pull is not None
        params = stream.request.kv_transfer_params or {}
        with contextlib.suppress(KvTransferError, TimeoutError):  # then its lease frees it
            async with asyncio.timeout(self._options.kv_pull_timeout_s):
                unwanted = replace(stream.pull, unwanted=True)
                await self._transport.pull(params["remote_host"], params["remote_port"], unwanted)
