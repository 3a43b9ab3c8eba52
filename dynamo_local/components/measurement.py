"""One repetition of a measurement, at the engine itself: nothing of the data plane is in the way.

`dynamo profile` asks for it (`measurable` in the worker's section; otherwise there is no such endpoint). The engine's
own passes are what is told, where it tells of them; else the times at which its outputs came.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from random import Random
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.passes import ForwardPass
from dynamo_local.errors import DeadlineExceeded
from dynamo_local.ports import Engine, EngineOutput, EngineRequest, SamplingParams
from dynamo_local.transport.passes import PassRecorder

MEASURE = "measure"
"""The endpoint's name."""
PASSES_MAX = 512
"""In one answer."""
TOLD_S = 1.0
"""So long a pass is waited for after its output."""
LOWEST_TOKEN, TOKENS = 10, 900
"""Token ids of prompts: every vocabulary has them, and none of them is special in the ones that are used."""

_Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]


class MeasureRequest(msgspec.Struct, frozen=True):
    """`prompts` of `tokens`, of which the first `cached` were there before. They are sent one after the other, each
    for its first token. With `passes` above 0 they decode side by side, until that many passes had all of them in.
    With `beside` above 0, until that many passes also computed a further prompt of that many tokens."""

    prompts: Annotated[int, Meta(ge=1, le=4096)]
    tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    seed: int
    cached: _Tokens = 0
    passes: _Tokens = 0
    beside: _Tokens = 0
    answer_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """Tokens that a sequence may decode: there must be room for them in the cache."""
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class Measurable:
    """An engine that can be measured; `recorder` is told of its passes (None: nobody is)."""

    def __init__(self, engine: Engine, recorder: PassRecorder | None, clock: Clock | None = None) -> None:
        self._engine = engine
        self._recorder = recorder
        self._clock = clock or AsyncioClock()
        self._alone = asyncio.Lock()

    async def measure(self, request: MeasureRequest) -> dict[str, Any]:
        """`{"passes": [[wall_s, decode requests, KV tokens, prefill tokens]], "ttft_s": [each prompt's], "itl_s": …}`.

        One at a time. Raises what the engine refuses the prompts with, and `DeadlineExceeded`.
        """
        async with self._alone:
            with self._watching(request) as seen:
                try:
                    async with asyncio.timeout(request.timeout_s):
                        times = await (self._decode if request.passes else self._prefill)(request, seen)
                except TimeoutError:
                    asked = f"{request.prompts} prompts of {request.tokens} tokens"
                    raise DeadlineExceeded(f"{asked} did not run within {request.timeout_s:g} s") from None
            return {"passes": [_row(passed) for passed in seen.kept[-PASSES_MAX:]], **times}

    @contextlib.contextmanager
    def _watching(self, request: MeasureRequest) -> Any:
        seen = _Seen(request)
        if self._recorder is not None:
            self._recorder.listeners.append(seen.take)
        try:
            yield seen
        finally:
            if self._recorder is not None:
                self._recorder.listeners.remove(seen.take)

    async def _prefill(self, request: MeasureRequest, seen: _Seen) -> dict[str, Any]:
        random = Random(request.seed)
        prompts = [prompt_of(random, request.tokens) for _ in range(request.prompts)]
        if request.cached:
            for prompt in prompts:
                await self._first_token(prompt[: request.cached])
            await self._told(seen, request.cached * request.prompts)
            seen.clear()
        took_s = []
        for prompt in prompts:
            began_s = self._clock.now_s()
            await self._first_token(prompt)
            took_s.append(self._clock.now_s() - began_s)
        await self._told(seen, (request.tokens - request.cached) * request.prompts)
        return {"ttft_s": took_s, "itl_s": None}

    async def _told(self, seen: _Seen, tokens: int) -> None:
        """Return when passes with so many prompt tokens were told of, or none come: an engine in another process tells
        of a pass after its output."""
        if self._recorder is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOLD_S):
                    await seen.until(tokens)

    async def _first_token(self, prompt: Sequence[int]) -> None:
        async with contextlib.aclosing(self._outputs(prompt, 1)) as outputs:
            async for _ in outputs:
                pass

    async def _decode(self, request: MeasureRequest, seen: _Seen) -> dict[str, Any]:
        """All at once, in one turn of the loop; ended as soon as enough was seen, or when the answers are over."""
        random = Random(request.seed)
        prompts = [prompt_of(random, request.tokens) for _ in range(request.prompts)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream(prompt, request.answer_max)) for prompt in prompts]
            enough = group.create_task(seen.enough.wait())
            others = [group.create_task(self._beside(request.beside, random, seen))] if request.beside else []
            await asyncio.wait([enough, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (enough, *others, *tasks):
                task.cancel()
        gaps = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        found = [gap for gap in gaps if gap is not None]
        return {"ttft_s": [], "itl_s": sum(found) / len(found) if found else None}

    async def _beside(self, tokens: int, random: Random, seen: _Seen) -> None:
        """One prompt after the other, from when all the others decode, until this is cancelled."""
        await seen.decoding.wait()
        while True:
            await self._first_token(prompt_of(random, tokens))

    async def _stream(self, prompt: Sequence[int], most: int) -> float | None:
        """The mean gap between its tokens; None where it had no two. Cancelled, it says so far."""
        first_s, last_s, count = 0.0, 0.0, 0
        try:
            async with contextlib.aclosing(self._outputs(prompt, most)) as outputs:
                async for output in outputs:
                    last_s = self._clock.now_s()
                    first_s = first_s or last_s
                    count += len(output.token_ids)
        except asyncio.CancelledError:
            pass  # enough was seen; this is the end that `_decode` gives it
        return (last_s - first_s) / (count - 1) if count > 1 else None

    def _outputs(self, prompt: Sequence[int], most: int) -> AsyncGenerator[EngineOutput, None]:
        sampling = SamplingParams(most, temperature=0.0, ignore_eos=True, min_tokens=most)
        request = EngineRequest(f"measure-{secrets.token_hex(6)}", list(prompt), sampling)
        return cast(AsyncGenerator[EngineOutput, None], self._engine.generate(request))


class _Seen:
    """The passes that a request is about. For prompts these are the passes that compute one. Otherwise they decode
    all of them, and compute a whole one `beside` them if that is asked for. `decoding`: all of them do."""

    def __init__(self, request: MeasureRequest) -> None:
        self._request = request
        self._prompt_tokens = 0
        self._news = asyncio.Event()
        self.kept: list[ForwardPass] = []
        self.enough = asyncio.Event()
        self.decoding = asyncio.Event()

    def take(self, passed: ForwardPass) -> None:
        """A listener of the recorder."""
        scheduled = passed.scheduled
        if passed.heartbeat:
            return
        if not self._request.passes:
            if scheduled.num_prefill_requests:
                self.kept.append(passed)
                self._prompt_tokens += scheduled.sum_prefill_tokens
                self._news.set()
        elif scheduled.num_decode_requests == self._request.prompts:
            self.decoding.set()
            if scheduled.sum_prefill_tokens == self._request.beside:
                self.kept.append(passed)
                if len(self.kept) >= self._request.passes:
                    self.enough.set()

    def clear(self) -> None:
        """Forget them."""
        self.kept.clear()
        self._prompt_tokens = 0

    async def until(self, prompt_tokens: int) -> None:
        """Return when the kept passes computed so many tokens of prompts."""
        while self._prompt_tokens < prompt_tokens:
            self._news.clear()
            await self._news.wait()


def prompt_of(random: Random, tokens: int) -> list[int]:
    """So many random tokens."""
    return [LOWEST_TOKEN + byte * TOKENS // 256 for byte in random.randbytes(tokens)]


def _row(passed: ForwardPass) -> tuple[float, int, int, int, int]:
    scheduled = passed.scheduled
    return (
        passed.wall_time_s,
        scheduled.num_decode_requests,
        scheduled.sum_decode_kv_tokens,
        scheduled.sum_prefill_tokens,
        scheduled.sum_prefill_kv_tokens,
    )
