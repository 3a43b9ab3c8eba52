"""One repetition: what is asked of a worker for a point, and what its answer says. Pure but for the asking."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from random import Random
from statistics import fmean
from typing import Any

import httpx

from dynamo_local.components.commands.http_server import parse_models
from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.components.measurement import prompt_of
from dynamo_local.errors import DynamoError
from dynamo_local.profile.outside import gap_of, kv_tokens_of
from dynamo_local.profile.points import KV_MAX, Kind, Limits, Point
from dynamo_local.profile.repetitions import Sample, robust_mean

PROMPT_TOKENS = 8192
"""Short prompts are measured several at a time, one after the other: so many tokens, and at most `PROMPTS_MAX`."""
PROMPTS_MAX = 5
PASSES = 40
"""Decode passes of a repetition."""
MIXED_PASSES = 10
"""Those with a prompt beside them."""
MIXED_LONGER = 1000
"""Tokens more for the others meanwhile: until the next prompt is there, a quick engine runs many passes without one."""
TIMEOUT_S = 300.0


class NoMeasurement(DynamoError):
    """A repetition gave nothing that can be counted."""

    code = "no_measurement"


def request_of(point: Point, limits: Limits, seed: int) -> dict[str, Any]:
    """The request to `components.measurement`."""
    if point.kind not in (Kind.DECODE, Kind.MIXED):
        prompts = max(1, min(PROMPTS_MAX, PROMPT_TOKENS // point.tokens))
        return {
            "prompts": prompts,
            "tokens": point.tokens,
            "cached": point.cached,
            "seed": seed,
            "timeout_s": TIMEOUT_S,
        }
    # The first of them decode while the last prompts are computed, so the sequences grow by these passes, too.
    filling = math.ceil(point.requests * point.tokens / limits.max_num_batched_tokens)
    grown = filling + PASSES
    tokens = max(1, point.tokens - grown // 2)
    spare_tokens = (int(limits.max_kv_tokens * (1 + KV_MAX) / 2) - point.chunk) // point.requests - tokens
    longest = grown + (PASSES if point.kind is Kind.DECODE else MIXED_LONGER)
    most = max(2, min(longest, limits.context_length - tokens - 1, spare_tokens))
    wanted = PASSES if point.kind is Kind.DECODE else MIXED_PASSES
    return {
        "prompts": point.requests,
        "tokens": tokens,
        "passes": min(wanted, max(1, most - filling - 1)),
        "beside": point.chunk,
        "answer_max": most,
        "seed": seed,
        "timeout_s": TIMEOUT_S,
    }


def sample_of(point: Point, answer: Mapping[str, Any], request: Mapping[str, Any], worker: str, at_s: float) -> Sample:
    """The answer as a measurement. Raises `NoMeasurement`."""
    rows = answer["passes"]
    beside = f" and a prompt of {point.chunk}" if point.chunk else ""
    if point.kind in (Kind.DECODE, Kind.MIXED):
        if rows:
            value_s = robust_mean([row[0] for row in rows])
            return Sample(worker, at_s, value_s * 1000, float(point.requests), fmean(row[2] for row in rows))
        if answer["itl_s"] is None or point.kind is Kind.MIXED:
            raise NoMeasurement(f"no pass had all {point.requests} requests of {point.tokens} tokens in it{beside}")
        kv_tokens = answer.get("kv_tokens") or point.requests * (request["tokens"] + request["answer_max"] / 2)
        return Sample(worker, at_s, answer["itl_s"] * 1000, float(point.requests), kv_tokens)
    prompts = int(request["prompts"])
    if rows:
        cached = point.tokens - sum(row[3] for row in rows) / prompts
        return Sample(worker, at_s, sum(row[0] for row in rows) / prompts * 1000, 1.0, max(0.0, cached))
    if not answer["ttft_s"]:
        raise NoMeasurement(f"no prompt of {point.tokens} tokens was answered")
    return Sample(worker, at_s, robust_mean(answer["ttft_s"]) * 1000, 1.0, float(point.cached))


# One repetition on a server that is a command. It is measured over HTTP, by the arrival times of its tokens.

FRAME = b"data: {"
SAID = 300
"""Characters of what a server says that go into an error."""


class NotAnswered(DynamoError):
    """A server that is measured refused a request, or broke it off."""

    code = "not_answered"


class Server:
    """An OpenAI server at `url`. `metrics` is the path of its metrics (None: it has none). `apart`: others prefill for
    those that decode."""

    def __init__(self, url: str, metrics: str | None = "/metrics", *, apart: bool = False) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)
        self._url = url
        self._metrics = metrics
        self._apart = apart
        self._model = ""

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def reported_limits(self, model: str | None = None) -> dict[str, int | None]:
        """Its limits, as far as it says them. Raises `NotAnswered` where it lists no model and none is given."""
        context = await self._list(model)
        kv = None
        if self._metrics is not None:
            try:
                kv = kv_tokens_of(Metrics((await self._http.get(self._metrics)).text))
            except (httpx.HTTPError, ValueError):
                kv = None  # it has none that can be read: then it is asked for
        return {"max_kv_tokens": kv, "context_length": context}

    async def _list(self, model: str | None) -> int | None:
        """The length of the longest sequence of its (first) model, which is asked from now on."""
        try:
            models = parse_models((await self._http.get("/v1/models")).text)
        except (httpx.HTTPError, ValueError):
            models = ()
        chosen = next((each for each in models if model in (None, each.name)), None)
        self._model = model or (chosen.name if chosen else "")
        if not self._model:
            raise NotAnswered(f"{self._url}/v1/models lists no model; look at `dynamo logs`")
        return None if chosen is None else chosen.max_model_len

    async def measure(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """As `components.measurement.Measurable.measure`, without passes. Raises `NotAnswered`."""
        if not self._model:
            await self._list(None)
        random = Random(request["seed"])
        prompts = [prompt_of(random, request["tokens"]) for _ in range(request["prompts"])]
        try:
            async with asyncio.timeout(timeout_s):
                found = self._decode if request.get("passes") else self._prefill
                return {"passes": [], **await found(prompts, request)}
        except TimeoutError:
            asked = f"{request['prompts']} prompts of {request['tokens']} tokens"
            raise NotAnswered(f"{self._url}: {asked} were not answered within {timeout_s:g} s") from None

    async def _prefill(self, prompts: list[list[int]], request: Mapping[str, Any]) -> dict[str, Any]:
        """One after the other; the cached part of each first."""
        if cached := request.get("cached", 0):
            for prompt in prompts:
                await self._stream(prompt[:cached], 1)
        took_s = []
        for prompt in prompts:
            began_s = time.monotonic()
            took_s.append((await self._stream(prompt, 1))[0] - began_s)
        return {"ttft_s": took_s, "itl_s": None}

    async def _decode(self, prompts: list[list[int]], request: Mapping[str, Any]) -> dict[str, Any]:
        """All at once, each to its end: what counts is the time in which all of them decode. Where others prefill, each
        prompt is asked before: from a cache they come together, and the first has not ended when the last begins."""
        answer = request["answer_max"]
        if self._apart:
            await asyncio.gather(*(self._stream(prompt, 1) for prompt in prompts))
        streams = await asyncio.gather(*(self._stream(prompt, answer) for prompt in prompts))
        gap = gap_of(streams, answer)
        if gap is None:
            return {"ttft_s": [], "itl_s": None}
        return {"ttft_s": [], "itl_s": gap.itl_s, "kv_tokens": len(prompts) * (request["tokens"] + gap.tokens)}

    async def _stream(self, prompt: list[int], answer: int) -> list[float]:
        """When each of its frames came."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": answer, "min_tokens": answer, "ignore_eos": True}
        times_s: list[float] = []
        rest = b""
        try:
            async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if response.status_code != httpx.codes.OK:
                    said = (await response.aread()).decode(errors="replace")[:SAID]
                    raise NotAnswered(f"{self._url} answers {response.status_code}: {said}")
                async for piece in response.aiter_raw():
                    rest += piece
                    times_s += [time.monotonic()] * rest.count(FRAME)
                    rest = rest[-len(FRAME) + 1 :]
        except httpx.HTTPError as error:
            raise NotAnswered(f"{self._url} broke a request off: {error or type(error).__name__}") from error
        if not times_s:
            raise NotAnswered(f"{self._url} streamed no token for a prompt of {len(prompt)} tokens")
        return times_s
