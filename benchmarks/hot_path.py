"""The cost of a token and of a request for Frontend and Processor in Python alone: no sockets, no NATS.

A worker's frames are put into the data plane's connections by hand, and what would go to the clients' sockets is
counted. Nothing else runs, so it can be told on a busy machine which of two versions is dearer, and why:

    python -m benchmarks hot_path            # microseconds of CPU
    python -m benchmarks.hot_path            # a table of functions: tokens
    python -m benchmarks.hot_path requests
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import pstats
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import uvicorn

from benchmarks.harness import Report
from benchmarks.load import chat

STREAMS: Final = 64
SHOWN: Final = 25
NAME: Final = "sim-tiny"


def run(short: bool) -> Report:
    """CPU per token and per request."""
    report = Report("hot_path")
    rounds, tokens, requests = (3, 50, 100) if short else (9, 300, 1000)

    async def measure() -> tuple[list[float], list[float]]:
        bench = Bench()
        await bench.tokens(50)
        await bench.requests(50)
        per_token = [await bench.tokens(tokens) for _ in range(rounds)]
        return per_token, [await bench.requests(requests) for _ in range(rounds)]

    per_token, per_request = _uvloop(measure())
    report.add(f"CPU per token, {STREAMS} streams", "µs", per_token)
    report.add("CPU per request of one token", "µs", per_request)
    return report


class Transport:
    """Takes what is written; a client's or a worker's."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def nothing(self, *_: Any, **__: Any) -> None:
        """For what is not looked at."""

    abort = close = pause_reading = resume_reading = set_write_buffer_limits = set_protocol = nothing


class Worker:
    """`ports.EndpointClient` of one worker whose frames are put in by hand."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def instances(self) -> tuple[Any, ...]:
        from dynamo_local.core.types import Instance

        return (Instance("bench", "VllmWorker", "generate", 1, subject=""),)

    async def call(self, payload: Any, **_: Any) -> Any:
        from dynamo_local.transport.requests.frames import FrameKind, encode_value, frame
        from dynamo_local.transport.requests.stream import InboundStream, ResponseStream

        encode_value(payload)
        inbound = InboundStream(lambda inbound, _: inbound.accept("the worker", b""), lambda _: None)
        inbound.connection_made(cast(asyncio.BaseTransport, Transport()))
        inbound.data_received(frame(FrameKind.HELLO, 0, bytes(16)))
        self.open.append(inbound)
        return ResponseStream(1, inbound)


class Bench:
    """Frontend and Processor as one process has them."""

    def __init__(self) -> None:
        from dynamo_local.components.dispatcher import Dispatcher, make_picker
        from dynamo_local.components.models_view import ModelCard, ModelsView, models_prefix
        from dynamo_local.components.openai.app import create_app
        from dynamo_local.components.openai.generation import FrontendDeps
        from dynamo_local.components.openai.server import BoundedHttpProtocol, FrontendState
        from dynamo_local.components.pipeline import Pipeline
        from dynamo_local.components.text.tokenizer import load_tokenizer
        from dynamo_local.core.types import Instance
        from dynamo_local.ports import KeyValue, PutEvent
        from dynamo_local.transport.requests.local import LocalClient, LocalEndpoint

        self.worker = Worker()
        models = ModelsView("bench")
        card = ModelCard(NAME, "VllmWorker", "generate", 16384, 0.0).encode()
        models.apply(PutEvent(KeyValue(f"{models_prefix('bench')}{NAME}:1", card, 1)))
        dispatcher = Dispatcher(cast(Any, self.worker), make_picker("least-loaded", None), lambda _: {})
        pipeline = Pipeline(load_tokenizer(NAME), models, dispatcher, NAME)

        async def answer(request: Any, _: Any) -> Any:
            return pipeline.answering("chat", request, None)

        here = Instance("bench", "Processor", "chat", 2, subject="")
        client = LocalClient(LocalEndpoint("chat", answer, None), lambda: here)
        app = create_app(FrontendDeps(chat=client, completions=client, models=models))
        self._config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
        self._config.load()
        self._state, self._protocol = FrontendState(), BoundedHttpProtocol

    def _ask(self, number: int, tokens: int, *, stream: bool) -> Any:
        protocol = self._protocol(config=self._config, server_state=self._state, app_state={})
        protocol.connection_made(cast(asyncio.Transport, Transport()))
        protocol.data_received(chat(number, tokens, stream=stream))
        return protocol

    async def tokens(self, count: int) -> float:
        """Microseconds per token of so many in each stream; all streams get theirs in one turn, as from one pass."""
        from dynamo_local.transport.requests.frames import FrameKind, data_frame, encode_value, frame

        self.worker.open.clear()
        clients = [self._ask(n, count + 2, stream=True) for n in range(STREAMS)]
        await _until(lambda: len(self.worker.open) == STREAMS)
        begun = data_frame(0, [encode_value({"token_ids": ()})]) + data_frame(1, [encode_value({"token_ids": (67,)})])
        for inbound in self.worker.open:
            inbound.data_received(begun)
        await _until(lambda: all(b'"content":"a"' in each.transport.written for each in clients))
        frames = [data_frame(2 + n, [encode_value({"token_ids": (67,)})]) for n in range(count)]
        begin_s = time.process_time()
        for data in frames:
            for inbound in self.worker.open:
                inbound.data_received(data)
            await asyncio.sleep(0)
        spent_s = time.process_time() - begin_s
        last = data_frame(count + 2, [encode_value({"token_ids": (67,), "finish_reason": "length"})])
        for inbound in self.worker.open:
            inbound.data_received(last + frame(FrameKind.END, count + 3))
        await _until(lambda: all(each.transport.written.endswith(b"0\r\n\r\n") for each in clients))
        assert all(each.transport.written.count(b'"content":"a"') == count + 2 for each in clients)
        return spent_s / (STREAMS * count) * 1e6

    async def requests(self, count: int) -> float:
        """Microseconds per request of one token, one after the other."""
        from dynamo_local.transport.requests.frames import FrameKind, data_frame, encode_value, frame

        items = [encode_value({"token_ids": ()}), encode_value({"token_ids": (67,), "finish_reason": "length"})]
        answer = data_frame(0, items) + frame(FrameKind.END, 2)
        begin_s = time.process_time()
        for number in range(count):
            self.worker.open.clear()
            client = self._ask(number, 1, stream=False)
            await _until(lambda: bool(self.worker.open))
            self.worker.open[0].data_received(answer)
            await _until(lambda client=client: client.cycle.response_complete)  # type: ignore[misc]
            assert client.transport.written.startswith(b"HTTP/1.1 200"), client.transport.written
            client.connection_lost(None)
        return (time.process_time() - begin_s) / count * 1e6


async def _until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110  # each turn is what the condition waits for
        await asyncio.sleep(0)


def _uvloop(work: Awaitable[Any]) -> Any:
    import uvloop

    async def main() -> Any:
        return await work

    return uvloop.run(main())


async def _profiled(what: str) -> str:
    bench, profile, text = Bench(), cProfile.Profile(), io.StringIO()
    measure = bench.requests if what == "requests" else bench.tokens
    await measure(50)
    profile.enable()
    await measure(300)
    profile.disable()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(SHOWN)
    return text.getvalue()


if __name__ == "__main__":
    print(_uvloop(_profiled(sys.argv[1] if len(sys.argv) > 1 else "tokens")))
