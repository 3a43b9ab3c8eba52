"""A scripted Processor: what the Frontend sees of the data plane, without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

from dynamo_local.core.types import Instance
from dynamo_local.transport.requests.stream import Take

Step = list[dict[str, Any]] | BaseException | asyncio.Event
"""A batch of items to yield, an error to raise, or an event to wait for."""


def usage(prompt_tokens: int = 7, completion_tokens: int = 3, cached_tokens: int = 0) -> dict[str, Any]:
    """A usage object as the Processor sends it with the last item."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def prompt(tokens: int = 7) -> dict[str, Any]:
    """The item that may come first."""
    return {"text": "", "num_tokens": 0, "finish_reason": None, "usage": None, "prompt_tokens": tokens}


def text(piece: str, num_tokens: int = 1) -> dict[str, Any]:
    return {"text": piece, "num_tokens": num_tokens, "finish_reason": None, "usage": None}


def last(piece: str = "", num_tokens: int = 0, reason: str = "stop", **counts: int) -> dict[str, Any]:
    return {"text": piece, "num_tokens": num_tokens, "finish_reason": reason, "usage": usage(**counts)}


def answer(*pieces: str, reason: str = "stop", prompt_tokens: int = 7) -> list[Step]:
    """A good response: the prompt's length, one batch per piece, the last item."""
    end = last(reason=reason, prompt_tokens=prompt_tokens, completion_tokens=len(pieces))
    return [[prompt(prompt_tokens)], *([text(piece)] for piece in pieces), [end]]


class FakeStream:
    """Plays a script. `closed` is set by `aclose`, `ended` when the script ran to its end."""

    instance_id = 1

    def __init__(self, script: Iterable[Step]) -> None:
        self._script = script
        self.closed = asyncio.Event()
        self.ended = False

    async def batches(self) -> AsyncIterator[list[Any]]:
        for step in self._script:
            await asyncio.sleep(0)  # frames come through the event loop
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, BaseException):
                raise step
            else:
                yield step
        self.ended = True

    async def pump(self, take: Take) -> None:
        async for batch in self.batches():
            if (room := take(batch)) is not None:
                await room

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for batch in self.batches():
            for item in batch:
                yield item

    async def aclose(self) -> None:
        self.closed.set()


class FakeEndpoint:
    """An `EndpointClient` whose calls are answered, one after the other, by `scripts`; the last one repeats.

    A script that is an exception is raised by `call` itself; a callable makes a script from the payload.
    """

    def __init__(self, *scripts: Sequence[Step] | BaseException | Callable[[dict[str, Any]], Iterable[Step]]) -> None:
        self._scripts = list(scripts) or [answer("Hello", " world")]
        self.payloads: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.streams: list[FakeStream] = []
        self.called = asyncio.Event()

    def instances(self) -> tuple[Instance, ...]:
        return (Instance("dynamo", "Processor", "chat/completions", 1, "subject"),)

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        return self.instances()

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        return ()

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> FakeStream:
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        self.payloads.append(payload)
        self.calls.append({"instance_id": instance_id, "request_id": request_id, "timeout_s": timeout_s})
        self.called.set()
        if isinstance(script, BaseException):
            raise script
        stream = FakeStream(script(payload) if callable(script) else script)
        self.streams.append(stream)
        return stream
