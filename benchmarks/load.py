"""The load generator, in a process of its own: `python -m benchmarks.load`, a plan on stdin, results on stdout (JSON).

It shares the cores with what it measures, so it is cheap: uvloop, plain sockets, one regular expression per read.
Plans: `{"kind": "latency", …}` and `{"kind": "streams", …}`; the keyword arguments of the functions below.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import uvloop

from benchmarks.processes import ROOT, cpu_s, module_command, rss_mib

LIMIT_S = 60.0
_TEXT = re.compile(rb'"content":"([^"]*)"')
_ID = re.compile(rb'"id":"chatcmpl-([0-9A-Za-z._-]+)"')
_CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_DONE = b"data: [DONE]"
_END = _DONE + b"\n\n"
_SOME_TEXT = re.compile(rb'"content":"[^"]')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
TAIL_BYTES = 2048
"""The usage and the end stand within so many last bytes of a stream."""


def generate(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Carry the plan out in another process. RuntimeError with its last words if it fails."""
    done = subprocess.run(
        module_command("benchmarks.load"),
        input=json.dumps(plan),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 10.0,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the load generator failed: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# --- HTTP --------------------------------------------------------------------------------------


PREFIXES = 16
"""Kinds of prefixes that prompts may share."""


def chat(
    number: int,
    max_tokens: int,
    *,
    stream: bool,
    model: str = "sim-tiny",
    usage: bool = False,
    words: int = 0,
    shared: bool = False,
) -> bytes:
    """One request, whole; each number gives another prompt, longer by `words`. With `usage` a stream ends with its
    numbers of tokens. With `shared`, prompts begin with these words, in `PREFIXES` kinds."""
    kind = number % PREFIXES * 61 if shared else number
    more = "".join(f" word{(kind + n) % 997}" for n in range(words))
    own = f"Request {number}: tell me a story of a worker and its arbiter."
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{more} {own}" if shared else f"{own}{more}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if usage else {}),
    }
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


class Unary:
    """One kept connection for answers that are not streamed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Unary:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes) -> bytes:
        """The answer's body. RuntimeError for any status but 200."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if (found := _CONTENT_LENGTH.search(head)) is not None:
            body = await self._reader.readexactly(int(found[1]))
        else:  # in chunks, as Dynamo's frontend answers
            body = b""
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                body += (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head.splitlines()[0].decode()}: {body[:300]!r}")
        return body

    def close(self) -> None:
        self._writer.close()


class Stream(asyncio.Protocol):
    """One request whose answer streams; `arrivals` are (time, characters of text so far).

    The engine of these benchmarks writes one character per token.
    """

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._done = request, done
        self._rest = b""
        self.id: str | None = None
        self.tokens = 0
        self.arrivals: list[tuple[float, int]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.WriteTransport.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        whole, separator, self._rest = (self._rest + data).rpartition(b"\n\n")
        if not separator:
            return
        if self.id is None and (found := _ID.search(whole)) is not None:
            self.id = found[1].decode()
        if count := sum(map(len, _TEXT.findall(whole))):
            self.tokens += count
            self.arrivals.append((now_s, self.tokens))
        if (whole + separator).endswith(_END):
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(RuntimeError(f"the stream broke after {self.tokens} tokens: {exc or self._rest[-300:]!r}"))

    def _finish(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error is not None:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
        self._transport.close()


async def stream(port: int, request: bytes) -> Stream:
    """Open, read to `[DONE]`, close."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    _, protocol = await loop.create_connection(lambda: Stream(request, done), "127.0.0.1", port)
    await done
    return protocol


# --- plans -------------------------------------------------------------------------------------


async def latency(port: int, rounds: int, requests: int, concurrency: int, sim: dict[str, Any]) -> dict[str, Any]:
    """The same request through everything and to an engine in this process, in turn; then both at `concurrency`."""
    from dynamo_local.engines.sim.engine import SimEngine
    from dynamo_local.engines.sim.options import SimOptions
    from dynamo_local.engines.sim.transfers import InMemoryTransport

    engine = SimEngine(SimOptions(**sim), transport=InMemoryTransport())
    await engine.start()
    connections = [await Unary.connect(port) for _ in range(concurrency)]
    await _alternate(connections[0], engine, 50)
    found = []
    for _ in range(rounds):
        http_s, stream_s, direct_s = await _alternate(connections[0], engine, requests, port)
        found.append(
            {
                "http_s": http_s,
                "first_token_s": stream_s,
                "direct_s": direct_s,
                "http_per_s": await _rate([_asker(connection) for connection in connections], requests),
                "direct_per_s": await _rate([_direct(engine) for _ in connections], requests),
            }
        )
    for connection in connections:
        connection.close()
    await engine.close()
    return {"rounds": found}


TOKENS_PER_REQUEST = 16


async def _alternate(
    connection: Unary, engine: Any, requests: int, port: int | None = None
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each: a unary request, the first token of a streamed one, and the engine alone."""
    http, first, alone = _asker(connection), [], _direct(engine)
    took: tuple[list[float], list[float]] = ([], [])
    for n in range(requests):
        for times, ask in zip(took, (http, alone), strict=True):
            begin_s = time.perf_counter()
            await ask(n)
            times.append(time.perf_counter() - begin_s)
        if port is not None and n % 4 == 0:
            begin_s = time.monotonic()
            answer = await stream(port, chat(n, TOKENS_PER_REQUEST, stream=True))
            first.append(answer.arrivals[0][0] - begin_s)
    return took[0], first, took[1]


def _asker(connection: Unary) -> Any:
    async def ask(number: int) -> None:
        await connection.ask(chat(number, TOKENS_PER_REQUEST, stream=False))

    return ask


def _direct(engine: Any) -> Any:
    from dynamo_local.ports import EngineRequest, SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS_PER_REQUEST, ignore_eos=True)

    async def ask(number: int) -> None:
        prompt = [number % 1000, *range(40)]
        async for _ in engine.generate(EngineRequest(str(number), prompt, sampling)):
            pass

    return ask


async def _rate(askers: list[Any], requests: int) -> float:
    """Requests per second with all askers at once."""

    async def work(ask: Any) -> None:
        for number in range(max(1, requests // len(askers))):
            await ask(number)

    begin_s = time.perf_counter()
    await asyncio.gather(*(work(ask) for ask in askers))
    return max(1, requests // len(askers)) * len(askers) / (time.perf_counter() - begin_s)


async def streams(port: int, count: int, tokens: int, pids: dict[str, int]) -> dict[str, Any]:
    """`count` streams at once to their ends, and what each process used meanwhile. The engine sets the pace."""
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    own_s, begin_s = time.process_time(), time.monotonic()
    answers = await asyncio.gather(*(stream(port, chat(n, tokens, stream=True)) for n in range(count)))
    wall_s = time.monotonic() - begin_s
    cores = {name: (cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}
    cores["load generator"] = (time.process_time() - own_s) / wall_s
    wrong = [answer.tokens for answer in answers if answer.tokens != tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {count} streams did not have {tokens} tokens: {wrong[:5]}")
    return {
        "wall_s": wall_s,
        "cores": cores,
        "rss_mib": {name: rss_mib(pid) for name, pid in pids.items()},
        "arrivals": {answer.id: answer.arrivals for answer in answers},
    }


class Timed(asyncio.Protocol):
    """One request whose answer streams, of any engine: the time of its first text, and its usage's tokens."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._done = request, done
        self._tail = b""
        self.first_s: float | None = None
        self.tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(f"no stream: {data[:300]!r}"))
            self._transport.close()
            return
        if self.first_s is None and _SOME_TEXT.search(data) is not None:
            self.first_s = time.monotonic()
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if _DONE in self._tail:
            if (found := _COMPLETION_TOKENS.search(self._tail)) is not None:
                self.tokens = int(found[1])
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"the stream broke: {exc or self._tail[-300:]!r}"))


async def beside(
    port: int,
    model: str,
    count: int,
    tokens: int,
    concurrency: int,
    pids: dict[str, int],
    words: int = 0,
    shared: bool = False,
) -> dict[str, Any]:
    """`count` requests of so many tokens, `concurrency` at a time: first tokens, requests per second, CPU of each
    process. Each is streamed on a connection of its own. Those of one token are not streamed, and their connections are
    kept; the first token is there when the answer is."""
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    begin_s, first_s, read = time.monotonic(), [], 0
    numbers = iter(range(count))

    async def streaming() -> None:
        nonlocal read
        loop = asyncio.get_running_loop()
        for number in numbers:
            done: asyncio.Future[None] = loop.create_future()
            request = chat(number, tokens, stream=True, model=model, usage=True, words=words, shared=shared)
            sent_s = time.monotonic()
            _, answer = await loop.create_connection(lambda: Timed(request, done), "127.0.0.1", port)  # noqa: B023
            await done
            if answer.tokens != tokens or answer.first_s is None:
                raise RuntimeError(f"a stream had {answer.tokens} tokens, not {tokens}")
            first_s.append(answer.first_s - sent_s)
            read += answer.tokens

    async def asking() -> None:
        nonlocal read
        connection = await Unary.connect(port)
        for number in numbers:
            request = chat(number, tokens, stream=False, model=model, words=words, shared=shared)
            sent_s = time.monotonic()
            await connection.ask(request)
            first_s.append(time.monotonic() - sent_s)
            read += tokens
        connection.close()

    await asyncio.gather(*((asking if tokens == 1 else streaming)() for _ in range(concurrency)))
    wall_s = time.monotonic() - begin_s
    return {
        "wall_s": wall_s,
        "tokens": read,
        "first_s": first_s,
        "per_s": count / wall_s,
        "cpu_s": {name: cpu_s(pid) - before[name] for name, pid in pids.items()},
    }


async def _main() -> None:
    plan = json.load(sys.stdin)
    kinds: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
        "latency": latency,
        "streams": streams,
        "beside": beside,
    }
    async with asyncio.timeout(LIMIT_S):
        result = await kinds[plan.pop("kind")](**plan)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    uvloop.run(_main())
