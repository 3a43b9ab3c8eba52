"""Requests of every kind that the API takes, many at once, held to what an undisturbed graph answers.

A cut answer may end with a typed, retryable error, and must be the beginning of the right one. A client that has got
nothing yet sees no error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from dynamo_local.errors import from_wire
from tests.drivers.flips import aflip
from tests.drivers.scaled import ascale, names, settled
from tests.drivers.served import Served, auntil
from tests.vllm.oracle.comparing import ADDED, difference, plain

TIMEOUT_S = 600.0
"""Limit of one answer: a thousand share two cores."""
CACHED = ("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Asked:
    """One request. `kind` is a row of `KINDS`."""

    kind: str
    path: str
    body: Mapping[str, Any]

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True


def _chat(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}


def _completion(text: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, **more}


KINDS: Mapping[str, Any] = {
    "a tool that must be called": lambda text, n: _chat(text, tools=[TOOL], tool_choice="required", max_tokens=n),
    "a named tool": lambda text, n: _chat(
        text, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=n
    ),
    "tools, auto": lambda text, n: _chat(text, tools=[TOOL], max_tokens=n),
    "a JSON schema": lambda text, n: _chat(
        text, response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}, max_tokens=n
    ),
    "a regular expression": lambda text, n: _completion(
        text, structured_outputs={"regex": "(ab|cd){40}-[0-9]{4}"}, max_tokens=n
    ),
    "a choice": lambda text, n: _chat(text, structured_outputs={"choice": ["yes", "no", "maybe"]}, max_tokens=n),
    "logprobs of a chat": lambda text, n: _chat(text, logprobs=True, top_logprobs=3, max_tokens=n, ignore_eos=True),
    "logprobs of a text": lambda text, n: _completion(text, logprobs=2, max_tokens=n, ignore_eos=True),
    "several choices": lambda text, n: _chat(text, n=3, seed=5, temperature=0.8, max_tokens=n, ignore_eos=True),
    "several choices with logprobs": lambda text, n: _completion(
        text, n=2, seed=9, temperature=0.8, logprobs=1, max_tokens=n, ignore_eos=True
    ),
    "several prompts": lambda text, n: _completion([text, f"Also: {text}"], echo=True, max_tokens=n, ignore_eos=True),
    "a plain chat": lambda text, n: _chat(text, max_tokens=n, ignore_eos=True),
    "responses with a tool": lambda text, n: (
        "/v1/responses",
        {
            "input": text,
            "max_output_tokens": n,
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
            "tool_choice": "required",
        },
    ),
    "messages with a tool": lambda text, n: (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": n,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
}
"""Name -> (path, body) of a request about a text, with so many tokens at most."""


def requests(model: str, texts: int, tokens: Sequence[int], **more: Any) -> list[Asked]:
    """Every kind about so many texts, streamed and not; `more` is for every body that samples by itself."""
    found = []
    for number in range(texts):
        for at, (kind, made) in enumerate(KINDS.items()):
            text = f"Request {number} is about {kind}: what becomes of it when its worker leaves?"
            path, body = made(text, tokens[(number + at) % len(tokens)])
            own = {} if "temperature" in body else more
            for stream in (False, True):
                streamed = {"stream": True} if stream else {}
                found.append(Asked(kind, path, {"model": model, **own, **body, **streamed}))
    return found


@dataclass(slots=True)
class Tally:
    """Their outcome. `cut` are those that ended with a retryable error after a right beginning."""

    right: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    open: int = 0

    def __str__(self) -> str:
        return f"{self.right.total()} right, {self.cut.total()} cut {dict(self.cut)}, {len(self.wrong)} wrong"


async def ask(http: httpx.AsyncClient, asked: Asked) -> Any:
    """The answer, as far as it came, without ids and times."""
    kind, body, status = "", bytearray(), 0
    async with http.stream("POST", asked.path, json=dict(asked.body)) as response:
        status, kind = response.status_code, response.headers.get("content-type", "")
        async for piece in response.aiter_bytes():
            body += piece
    return {**_uncached(plain(status, bytes(body), kind)), "error": _error(status, bytes(body), kind)}


def _uncached(value: Any) -> Any:
    """Without how much of a prompt was cached, which is chance; Anthropic counts that apart from the rest."""
    if isinstance(value, dict):
        found = {key: _uncached(each) for key, each in value.items() if key not in CACHED}
        if "cache_read_input_tokens" in value:
            found["input_tokens"] += value["cache_read_input_tokens"] or 0
        return found
    return [_uncached(each) for each in value] if isinstance(value, list) else value


def _error(status: int, body: bytes, kind: str) -> Mapping[str, Any] | None:
    if not kind.startswith("text/event-stream"):
        return json.loads(body)["error"] if status >= 400 else None
    last = [line for line in body.decode().splitlines() if line.startswith("data: {")][-1:]
    event: Mapping[str, Any] = json.loads(last[0].removeprefix("data: ")) if last else {}
    found = event.get("error")
    return found if isinstance(found, Mapping) else None


def judge(asked: Asked, answer: Any, truth: Any) -> tuple[str, str]:
    error = answer["error"]
    if error is None:
        differs = difference(answer, truth)
        return ("wrong", f"{asked}: {differs}") if differs else ("right", asked.kind)
    if answer["status"] != 200:
        return "wrong", f"{asked}: {answer['status']} {error}, before anything was sent"
    if not from_wire({"code": error.get("code"), "message": ""}).retryable:
        return "wrong", f"{asked}: {error}, which is not retryable"
    if not _begins(_without_error(answer["events"]), truth["events"]):
        return "wrong", f"{asked}: cut off, and {json.dumps(answer['events'])[:400]} is no beginning of the truth"
    return "cut", f"{asked.kind}: {error['code']}"


def _without_error(events: Any) -> Any:
    """OpenAI's oldest forms and the newer ones, as `comparing` adds them up."""
    if len(events) == 2 and isinstance(events[0], dict):
        choices, beside = events
        return [choices, [each for each in beside if not (isinstance(each, dict) and "error" in each)]]
    return [each for each in events if not (isinstance(each[1], dict) and "error" in each[1])]


def _begins(part: Any, whole: Any, name: str = "") -> bool:
    """Whether all that is in `part` stands in `whole`, at the same place: texts and lists may end earlier."""
    if isinstance(part, Mapping) and isinstance(whole, Mapping):
        return all(key in whole and _begins(value, whole[key], str(key)) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(_begins(a, b, name) for a, b in zip(part, whole, strict=False))
    if isinstance(part, str) and isinstance(whole, str) and name in ADDED:
        return whole.startswith(part)
    return part is None or difference(part, whole) is None


@asynccontextmanager
async def http_client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        yield http


async def truths(url: str, asked: Sequence[Asked], *, at_once: int = 1) -> list[Any]:
    slots = asyncio.Semaphore(at_once)
    async with http_client(url) as http:

        async def one(each: Asked) -> Any:
            async with slots:
                return await ask(http, each)

        found = await asyncio.gather(*(one(each) for each in asked))
    bad = [(each, answer["error"]) for each, answer in zip(asked, found, strict=True) if answer["error"]]
    assert not bad, bad[:3]
    return list(found)


@asynccontextmanager
async def mixed_load(
    url: str, asked: Sequence[Asked], truth: Sequence[Any], *, count: int, at_once: int
) -> AsyncIterator[Tally]:
    """At least `count` of them, `at_once` under way at any time, for as long as the block lasts; then all end."""
    tally, leave = Tally(), asyncio.Event()
    sent = 0
    async with http_client(url) as http:

        async def client() -> None:
            nonlocal sent
            while not tally.wrong and (sent < count or not leave.is_set()):
                turn, sent = sent % len(asked), sent + 1
                tally.open += 1
                try:
                    found, why = judge(asked[turn], await ask(http, asked[turn]), truth[turn])
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    found, why = "wrong", f"{asked[turn]}: {type(error).__name__}: {error}"
                finally:
                    tally.open -= 1
                if found == "wrong":
                    tally.wrong.append(why)
                else:
                    (tally.right if found == "right" else tally.cut)[why] += 1

        clients = [asyncio.create_task(client()) for _ in range(at_once)]
        try:
            yield tally
        except Exception as error:
            error.add_note(f"{tally}, {tally.open} under way: {tally.wrong[:3]}")
            raise
        finally:
            leave.set()
            await asyncio.gather(*clients)


async def disturb(served: Served, *, crashing: Sequence[str], patience_s: float) -> None:
    """A decode worker drains and one comes, one prefills for a while, and one of each of `crashing` is killed."""
    for target in ("-1", "+1"):
        await ascale(served, "VllmWorker", target)
        await settled(served, patience_s)
    became = (await aflip(served, names(served, "VllmWorker")[-1]))["becomes"]
    became = str(became).removeprefix(f"{served.namespace}_")
    await auntil(lambda: served.states().get(became) == "ready", patience_s, what=served.states)
    await aflip(served, became)
    await settled(served, patience_s)
    for component in crashing:
        await crash(served, names(served, component)[-1], patience_s)


async def crash(served: Served, name: str, patience_s: float) -> None:
    pid = served.pids()[name]
    os.kill(pid, signal.SIGKILL)
    await auntil(lambda: served.pids().get(name) not in (None, pid), patience_s, what=served.states)
    await settled(served, patience_s)
