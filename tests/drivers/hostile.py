"""Requests that are made to cost more than their size, and what a graph's processes pay for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from hypothesis import strategies as st

from dynamo_local.errors import DynamoError
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.control import ControlClient
from dynamo_local.transport.nats import close_quietly, connect_nats
from tests.drivers.served import MODEL, Served, expected, stream_chat

MIB = 2**20
PING_EVERY_S = 0.02
PING_TIMEOUT_S = 60.0

JSON_FILLINGS = {
    "long string": lambda n: b'"' + b"a" * n + b'"',
    "words": lambda n: b'"' + b"a b " * (n // 4) + b'"',
    "spaces": lambda n: b'"' + b" " * n + b'"',
    "escapes": lambda n: b'"' + rb"\u0000" * (n // 6) + b'"',
    "emoji": lambda n: b'"' + "🧪".encode() * (n // 4) + b'"',
    "digits": lambda n: b"9" * n,
    "fraction": lambda n: b"0." + b"0" * n + b"1",
    "strings": lambda n: b"[" + b'"ab",' * (n // 5) + b'"a"]',
    "long strings": lambda n: b'["' + b'","'.join([b"a" * 1000] * (n // 1003)) + b'"]',
    "numbers": lambda n: b"[" + b"1," * (n // 2) + b"1]",
    "empty lists": lambda n: b"[" + b"[]," * (n // 3) + b"[]]",
    "empty objects": lambda n: b"[" + b"{}," * (n // 3) + b"{}]",
    "many keys": lambda n: b"{" + b",".join(b'"%06x":1' % key for key in range(n // 11)) + b"}",
    "one key again": lambda n: b"{" + b'"a":1,' * (n // 6) + b'"a":1}',
    "depth": lambda n: b"[" * n,
    "objects in objects": lambda n: b'{"a":' * (n // 5),
    "messages": lambda n: b"[" + b'{"role":"tool","content":"a"},' * (n // 30) + b'{"role":"user","content":"a"}]',
    "parts": lambda n: b'[{"role":"user","content":['
    + b",".join([b'{"type":"text","text":""}'] * (n // 26))
    + b"]}]",
    "calls": lambda n: b'[{"role":"user","content":"a","tool_calls":[' + b"[]," * (n // 3) + b"[]]}]",
}  # fmt: skip
"""name -> a value of about n bytes, as JSON."""

CHAT_FIELDS = (
    "messages", "stop", "stop_token_ids", "max_tokens", "temperature", "seed", "model", "n", "best_of", "logprobs",
    "top_logprobs", "logit_bias", "tools", "tool_choice", "functions", "response_format", "guided_json", "guided_regex",
    "metadata", "user", "nvext", "stream_options", "no such parameter",
)  # fmt: skip
COMPLETION_FIELDS = ("prompt", "stop", "suffix", "echo", "logit_bias", "prompt_logprobs", "user")

MSGPACK_FILLINGS = {
    "long string": lambda n: b"\xdb" + n.to_bytes(4, "big") + b"a" * n,
    "empty lists": lambda n: b"\xdd" + n.to_bytes(4, "big") + b"\x90" * n,
    "empty maps": lambda n: b"\xdd" + n.to_bytes(4, "big") + b"\x80" * n,
    "numbers": lambda n: b"\xdd" + n.to_bytes(4, "big") + b"\x01" * n,
    "empty strings": lambda n: b"\xdd" + n.to_bytes(4, "big") + b"\xa0" * n,
    "messages": lambda n: b"\xdd" + (n // 7).to_bytes(4, "big") + b"\x81\xa4role\xa0" * (n // 7),
    "depth": lambda n: b"\x91" * n,
    "announced": lambda n: b"\xdd\xff\xff\xff\xff" + b"\x90" * n,
}
"""The same as msgpack."""

PROCESSOR_FIELDS = ("messages", "prompt", "stop", "stop_token_ids", "max_tokens", "request_id", "model", "else")


@dataclass(frozen=True)
class Hostile:
    """One request: `value` is a parameter's, written out; without a `name` it is the whole body."""

    path: str
    name: str
    filling: str
    size: int

    def body(self) -> bytes:
        value = JSON_FILLINGS[self.filling](self.size)
        if not self.name:
            return value
        members = {
            "model": b'"%s"' % MODEL.encode(),
            "max_tokens": b"2",
            **({"prompt": b'"Hi"'} if self.path.endswith("/completions") and "chat" not in self.path else
               {"messages": b'[{"role":"user","content":"Hi"}]'}),
            self.name: value,
        }  # fmt: skip
        return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in members.items()) + b"}"


def hostile_bodies(max_bytes: int) -> st.SearchStrategy[Hostile]:
    """Any filling in any field of either API, or as the body itself; half of them as large as is taken."""
    sizes = st.one_of(st.just(max_bytes - 1024), st.integers(1024, max_bytes - 1024))
    targets = st.sampled_from(
        [("/v1/chat/completions", name) for name in ("", *CHAT_FIELDS)]
        + [("/v1/completions", name) for name in ("", *COMPLETION_FIELDS)]
    )
    return st.builds(
        lambda target, filling, size: Hostile(*target, filling, size),
        targets,
        st.sampled_from(list(JSON_FILLINGS)),
        sizes,
    )


def resident_mib(served: Served, names: Sequence[str]) -> dict[str, float]:
    pids = served.pids()
    return {name: psutil.Process(pids[name]).memory_info().rss / MIB for name in names}


@dataclass
class Watched:
    """Observed while it was watched: the longest answers of the loops, the largest memory, streams that ended."""

    worst_s: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    streams: int = 0
    wrong: list[str] = field(default_factory=list)
    over: bool = False
    """Said beside the cancelling: nats-py loses one that comes together with the answer (`wait_for` of Python 3.11)."""

    def lag_s(self, name: str, untouched: str) -> float:
        """Seconds by which that loop's longest answer exceeds that of a process that the requests never reach, in
        the same seconds on the same machine."""
        return self.worst_s[name] - self.worst_s[untouched]


@asynccontextmanager
async def watching(served: Served, names: Sequence[str], streams: int = 2) -> AsyncIterator[Watched]:
    """Ask these workers' control endpoints again and again, read their memory, and stream answers that are known."""
    found = Watched()
    env = served.environment()
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env))
    control = ControlClient(nats, served.namespace)
    tasks = [asyncio.create_task(_ping(control, served, name, found)) for name in names]
    tasks.append(asyncio.create_task(_weigh(served, names, found)))
    tasks += [asyncio.create_task(_stream(served, number, found)) for number in range(streams)]
    try:
        await asyncio.sleep(0)
        yield found
    finally:
        found.over = True
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await close_quietly(nats)
    for result in results:
        if isinstance(result, Exception):
            raise AssertionError(f"a watch ended: {result!r}")


async def _ping(control: ControlClient, served: Served, name: str, found: Watched) -> None:
    found.worst_s[name] = 0.0
    while not found.over:
        began_s = time.monotonic()
        await control.call(f"{served.namespace}_{name}", "status", timeout_s=PING_TIMEOUT_S)
        found.worst_s[name] = max(found.worst_s[name], time.monotonic() - began_s)
        await asyncio.sleep(PING_EVERY_S)


async def _weigh(served: Served, names: Sequence[str], found: Watched) -> None:
    pids = await asyncio.to_thread(served.pids)
    processes = {name: psutil.Process(pids[name]) for name in names}
    while True:
        for name, process in processes.items():
            mib = process.memory_info().rss / MIB
            found.peak_mib[name] = max(found.peak_mib.get(name, 0.0), mib)
        await asyncio.sleep(PING_EVERY_S)


async def _stream(served: Served, number: int, found: Watched) -> None:
    right, _ = expected(f"Stream {number} goes on.", 40, ignore_eos=True)
    async with served.client() as client:
        while True:
            text, reason = await stream_chat(client, f"Stream {number} goes on.", 40, ignore_eos=True)
            found.streams += 1
            if (text, reason) != (right, "length"):
                found.wrong.append(text)


async def ask_and_forget(call: Any) -> str:
    """The name of the error with which a call of the data plane ended; empty for an answer."""
    with suppress(asyncio.CancelledError):
        try:
            stream = await call
            async for _ in stream:
                continue
        except DynamoError as error:
            return type(error).__name__
    return ""
