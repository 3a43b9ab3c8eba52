"""The open-loop HTTP client, in a process of its own: `python -m benchmarks.drain.client PLAN RECORDS`.

It sends each of the trace's requests when it is due, whatever became of those before. Each goes once, over a
connection of its own. Every answer is held against the oracle: text and `finish_reason`. PLAN is JSON, the fields of
`Plan`; RECORDS takes one JSON line per request, the fields of `Record`. It ends when its standard input is closed and
the last answer is there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import httptools
import uvloop

from benchmarks.drain.trace import Ask, asks
from benchmarks.traces import conversation
from dynamo_local.components.dispatcher import NEW_WORKER_S
from dynamo_local.components.text.tokenizer import Tokenizer, load_tokenizer
from dynamo_local.engines.sim.tokens import expected_output

MODEL = "sim-tiny"
ANSWER_S = NEW_WORKER_S + 30.0
"""An answer that has not ended by then counts as cut. A request whose worker was lost may wait for another one, and the
longest answer asked for takes 12 s."""

Outcome = Literal["right", "wrong", "refused", "cut"]
"""*refused*: an HTTP error instead of a stream; *cut*: a stream that ended in an error, or broke."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to send, and what (the arguments of `trace.asks`)."""

    port: int
    speed: float
    thinning: int
    answer_max: int


@dataclass(frozen=True, slots=True)
class Record:
    """One request; times are CLOCK_MONOTONIC seconds. `late_s` is how long after it was due it was sent.

    `request_id` is the Frontend's, None where no event told it; `why` says what was wrong.
    """

    number: int
    request_id: str | None
    late_s: float
    sent_s: float
    ended_s: float
    tokens: int
    outcome: Outcome
    why: str = ""


class Exchange(asyncio.Protocol):
    """One request and its answer; `done` is set when the answer is whole or the connection has gone."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.whole = False
        self.done = asyncio.get_running_loop().create_future()

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the connection was lost: {exc}" if exc else "the connection ended before the answer")

    def on_body(self, body: bytes) -> None:
        """httptools' callback: a piece of the answer, without HTTP's own framing."""
        self.body += body

    def on_message_complete(self) -> None:
        """httptools' callback: HTTP says that this was all."""
        self.whole = True
        self._finish("")

    def _finish(self, why: str) -> None:
        if not self.done.done():
            self.done.set_result(why)
            self._transport.close()


class Oracle:
    """Knows the right answer to a request."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer = load_tokenizer(MODEL)

    def answer(self, ask: Ask) -> tuple[str, str]:
        """`(text, finish_reason)`."""
        ids = self._tokenizer.encode_chat([{"role": "user", "content": ask.prompt}])
        tokens, reason = expected_output(ids, max_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos)
        return self._tokenizer.decode(tokens), reason


def http_request(ask: Ask) -> bytes:
    """The request, whole."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.max_tokens,
        "ignore_eos": ask.ignore_eos,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


@dataclass(slots=True)
class Answer:
    """The content of a stream's events."""

    request_id: str | None = None
    text: str = ""
    reason: str | None = None
    error: str | None = None
    ended: bool = False


def read_answer(body: bytes) -> Answer:
    """The answer in a body of server-sent events, as far as it came."""
    answer = Answer()
    for data in _events(body):
        if data == b"[DONE]":
            answer.ended = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"].get("code") or event["error"])
            continue
        answer.request_id = answer.request_id or str(event["id"]).partition("-")[2]
        for choice in event["choices"]:
            answer.text += choice["delta"].get("content") or ""
            answer.reason = choice["finish_reason"] or answer.reason
    return answer


def _events(body: bytes) -> Iterator[bytes]:
    for block in body.split(b"\n\n")[:-1]:  # behind the last blank line is nothing, or half an event
        if block.startswith(b"data: "):
            yield block[6:]


def judge(exchange: Exchange, why: str, oracle: Oracle, ask: Ask) -> tuple[Outcome, str, str | None]:
    """The outcome, what was wrong, and the request's id."""
    if exchange.body and exchange.status != 200:
        return "refused", f"{exchange.status}: {bytes(exchange.body[:200])!r}", None
    answer = read_answer(bytes(exchange.body))
    if why or answer.error or not answer.ended:
        return "cut", answer.error or why or "no [DONE]", answer.request_id
    text, reason = oracle.answer(ask)
    if (answer.text, answer.reason) != (text, reason):
        return "wrong", f"{len(answer.text)} of {len(text)} characters, {answer.reason} for {reason}", answer.request_id
    return "right", "", answer.request_id


async def exchange_one(port: int, number: int, ask: Ask, due_s: float, oracle: Oracle) -> Record:
    """Send one request, once, and judge what comes back."""
    loop = asyncio.get_running_loop()
    request = http_request(ask)
    sent_s = time.monotonic()
    try:
        _, exchange = await loop.create_connection(lambda: Exchange(request), "127.0.0.1", port)
    except OSError as error:
        now_s = time.monotonic()
        return Record(number, None, sent_s - due_s, sent_s, now_s, ask.max_tokens, "refused", str(error))
    try:
        why = await asyncio.wait_for(exchange.done, ANSWER_S)
    except TimeoutError:
        why = f"no end within {ANSWER_S:g} s"
    ended_s = time.monotonic()
    outcome, what, request_id = judge(exchange, why, oracle, ask)
    return Record(number, request_id, sent_s - due_s, sent_s, ended_s, ask.max_tokens, outcome, what)


async def run(plan: Plan, records: IO[str], stopped: asyncio.Event) -> None:
    """Send until `stopped`, then wait for what is open."""
    oracle = Oracle()
    open_tasks: set[asyncio.Task[None]] = set()
    begin_s = time.monotonic()

    async def one(number: int, ask: Ask) -> None:
        record = await exchange_one(plan.port, number, ask, begin_s + ask.at_s, oracle)
        records.write(json.dumps(asdict(record)) + "\n")

    source = asks(conversation().rows, speed=plan.speed, thinning=plan.thinning, answer_max=plan.answer_max)
    for number, ask in enumerate(source):
        wait_s = begin_s + ask.at_s - time.monotonic()
        if wait_s > 0:
            await asyncio.wait({stopping := asyncio.ensure_future(stopped.wait())}, timeout=wait_s)
            stopping.cancel()
        if stopped.is_set():
            break
        task = asyncio.create_task(one(number, ask))
        open_tasks.add(task)
        task.add_done_callback(open_tasks.discard)
    if open_tasks:
        await asyncio.wait(open_tasks)


async def main(plan: Plan, path: Path) -> None:
    """Until standard input is closed."""
    stopped = asyncio.Event()

    async def wait() -> None:
        await asyncio.to_thread(sys.stdin.read)
        stopped.set()

    waiting = asyncio.create_task(wait())
    with path.open("w", buffering=1) as records:
        await run(plan, records, stopped)
    await waiting


if __name__ == "__main__":
    uvloop.run(main(Plan(**json.loads(sys.argv[1])), Path(sys.argv[2])))
