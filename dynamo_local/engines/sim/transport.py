"""How KV gets from the engine that computed it to the engine that needs it: the side channel of a hand-off.

The puller names the engine, the hand-off and the prompt it expects behind it (a digest); the source checks all three,
takes the time of the transfer, frees its blocks and says so. A source that dies is noticed at once (the connection
breaks), one that hangs by the puller's deadline. The bytes themselves are not sent: nothing would look at them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_local.errors import DynamoError, KvTransferError, from_wire, to_wire

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
