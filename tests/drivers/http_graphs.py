"""Graphs of HTTP servers under `dynamo serve -f`, and clients of them that know what is right.

The servers are `tests/tools/openai_server.py`: token n of every answer is `n `.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import yaml
from openai import AsyncOpenAI

from tests.drivers.scaled import Load, load
from tests.drivers.served import ROOT, Served

MODEL = "tiny"
RECORD = "requests.jsonl"
SERVER = ROOT / "tests" / "tools" / "openai_server.py"


def section(role: str, workers: int, *words: str, **keys: Any) -> dict[str, Any]:
    """A service that is such a server; `words` are more of its options."""
    command = ["python", str(SERVER), "--port", "{port:http}", "--model", "{model}", "--record", RECORD, *words]
    return {
        "command": command,
        "runtime": "http",
        "role": role,
        "model": MODEL,
        "ServiceArgs": {"workers": workers},
        **keys,
    }


def http_graph(*words: str, **sections: dict[str, Any]) -> Served:
    """`dynamo serve -f` of these sections; `words` follow."""
    text = yaml.safe_dump({"Host": {"gpus": "sim:8"}, **sections}, sort_keys=False)
    return Served(*words, target=("-f", "deployment.yaml"), files={"deployment.yaml": text})


def text_of(tokens: int) -> str:
    return "".join(f"{n} " for n in range(tokens))


def seen(served: Served, **with_members: Any) -> list[dict[str, Any]]:
    """All servers' notes, in order; those with these members, if any are given (None: any value)."""
    path = Path(served.cwd) / RECORD
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        note for note in notes if all(key in note and value in (None, note[key]) for key, value in with_members.items())
    ]


def server_of(served: Served, name: str) -> psutil.Process:
    (child,) = psutil.Process(served.pids()[name]).children()
    return child


def held(served: Served, name: str) -> int:
    """How many generating requests that worker's server has at this moment."""
    words = server_of(served, name).cmdline()
    port = int(words[words.index("--port") + 1])
    found = 0
    for note in seen(served, port=port):
        if "started" in note:
            found = 0
        elif "path" in note and not note["path"].endswith("embeddings"):
            found += 1
        elif "ended" in note:
            found -= 1
    return found


def kill_server(served: Served, name: str) -> None:
    """`kill -9` of the server, not of the worker beside it."""
    os.kill(server_of(served, name).pid, signal.SIGKILL)


async def ask(client: AsyncOpenAI, tokens: int, *, stream: bool = False) -> str:
    """The text of one chat. Raises what the client raises, also for an error within a stream."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Count!"}], "max_tokens": tokens}
    if not stream:
        answer = await client.chat.completions.create(**asked)
        return answer.choices[0].message.content or ""
    text, reason = "", None
    async with await client.chat.completions.create(**asked, stream=True) as events:
        async for event in events:
            for choice in event.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    assert reason == "length", f"broken off after {text!r}"
    return text


def loaded(
    served: Served, clients: int = 8, tokens: tuple[int, ...] = (5, 20, 60)
) -> AbstractAsyncContextManager[Load]:
    """So many clients, each asking again and again, every other time for a stream; no retries of their own."""

    async def one(client: AsyncOpenAI, number: int, turn: int) -> str | None:
        count = tokens[(number + turn) % len(tokens)]
        text = await ask(client, count, stream=(number + turn) % 2 == 0)
        return None if text == text_of(count) else f"{count} tokens: {text!r}"

    return load(served, clients, one)


def cut(served: Served) -> Iterator[dict[str, Any]]:
    """Ends of servers that still had work when they were asked to go."""
    return (note for note in seen(served, sigterm_with=None) if note["sigterm_with"])
