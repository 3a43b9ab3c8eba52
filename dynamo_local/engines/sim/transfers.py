"""KV transfers between simulated engines: what a prefill engine holds, and what a decode engine pulls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dynamo_local.clock import Clock
from dynamo_local.engines.sim.options import SimOptions, logprobs_of
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
"""A connection that has not sent its request by then is closed."""


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


class LoopbackTransport:
    """A TCP server on 127.0.0.1 per source; a connection per pull; one JSON line each way."""

    async def serve(self, source: KvSource) -> KvListener:
        listener = _LoopbackListener(source)
        await listener.open()
        return listener

    async def pull(self, host: str, port: int, request: PullRequest) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise _gone(host, port, request, str(error)) from error
        try:
            writer.write(json.dumps(dataclasses.asdict(request)).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        except OSError as error:
            raise _gone(host, port, request, str(error)) from error
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            raise _gone(host, port, request, "the connection broke")
        answer = json.loads(line)
        if answer.get("error") is not None:
            raise from_wire(answer["error"])


class _LoopbackListener:
    def __init__(self, source: KvSource) -> None:
        self._source = source
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self.host, self.port = _LOOPBACK, 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, _LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        # After the connections: wait_closed waits for them since Python 3.12.
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            # The puller went away, or we are closing: break the connection. Nothing awaits this task.
            writer.transport.abort()
        finally:
            writer.close()
            self._connections.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_REQUEST_DEADLINE_S):
            line = await reader.readline()
        try:
            request = PullRequest(**json.loads(line))
        except (ValueError, TypeError) as error:
            answer: dict[str, Any] = {"error": to_wire(KvTransferError(f"not a pull request: {error}"))}
        else:
            served = asyncio.ensure_future(_serve_one(self._source, request))
            # The puller sends nothing more, so a read that returns means that it has gone.
            left = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait({served, left}, return_when=asyncio.FIRST_COMPLETED)
                if not served.done():
                    raise ConnectionAbortedError("the puller went away")
                answer = {"error": served.result()}
            finally:
                for future in (served, left):
                    future.cancel()
                await asyncio.gather(served, left, return_exceptions=True)
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


async def _serve_one(source: KvSource, request: PullRequest) -> dict[str, Any] | None:
    """The error to send, None if it went well."""
    try:
        await source.serve_pull(request)
    except DynamoError as error:
        return to_wire(error)
    return None


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
        try:
            await self._clock.sleep_until(started_s + self._options.transfer_s(pull.num_tokens))
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
