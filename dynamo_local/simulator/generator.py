"""Requests made from a few numbers: `dynamo simulate --generate chat|code|sin[,KEY=VALUE…]`.

`options` says what can be asked for, and where its defaults come from; `arrivals` makes the times, `prefixes` the
shared beginnings, `requests` puts them together.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.sdk.checks import listing, nearest
from dynamo_local.sdk.settings import validate_section
from dynamo_local.simulator.trace import HASH_BLOCK_TOKENS, TraceRequest

# --- Options of a generated trace. Three services with published figures give the defaults.
#
# `chat` follows the conversation trace of Kimi, a chat service (Qin et al., "Mooncake", FAST '25, and its published
# trace). Published: 12,031 requests in 3,537 s, on average 12,035 prompt tokens and 343 answer tokens. Every prompt
# begins with the same block of 512 tokens. The median prompt has 6,909 tokens. An unbounded cache holds 39.8 % of the
# tokens (llmtrafficlens 0.11). Its times are multiples of 3 s, so `cv` comes from counts. Their variance is 2.1 times
# their mean in windows of 10 s, and 2.9 times in windows of 60 s. For such arrivals that ratio tends to cv². Our own
# choice: a spread of 0.7 for the answers. Their median follows from the published mean.
#
# `code` follows the code completion service of Patel et al., "Splitwise" (ISCA '24, section III): medians of 1,500 and
# 13 tokens. Its data set is the Azure LLM inference trace 2023: 8,819 requests at 2.57 per second. There 95 % of the
# prompts have less than 7,302 tokens, which gives their spread. Our own choices: 1.24 for the answers' spread, and 2
# for `cv`. BurstGPT (Wang et al., arXiv:2401.17644) finds services burstier than Poisson, and uses a Gamma
# distribution, too.
# Shared prefixes are not published, so the prompts share none.
#
# `sin` is the load of Dynamo's load-planner benchmark: Poisson arrivals between 5 and 20 per second with a period of
# 150 s, prompts of 3,000 tokens and answers of 150.

REQUESTS_MAX = 5_000_000
"""A trace may have so many requests, by its rate and duration."""
PROMPT_TOKENS_MAX = 10**11
"""And so many prompt tokens, by its requests and their median length: about a month of `chat`."""

_DAY_S = 86_400.0
_Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
_Spread = Annotated[float, Field(ge=0, le=2)]


class BadGenerate(BadInput):
    """An option of the generator is impossible. The message names the key."""

    code = "bad_generate"


class GeneratorOptions(BaseModel):
    """A load in numbers. Times are seconds, rates requests per second, lengths tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Another seed, another trace of the same kind. The same seed gives the same one everywhere."""
    duration: Annotated[float, Field(gt=0, le=31 * _DAY_S)] = 3600.0
    """Seconds within which requests come. The first one comes at 0."""
    rate: Annotated[float, Field(gt=0, le=10_000)]
    """Requests per second, the mean over a whole period."""
    cv: Annotated[float, Field(ge=0, le=5)]
    """Burstiness: standard deviation ÷ mean of the gaps (Gamma). 0: as a clock; 1: Poisson; above: bursts."""
    period: Annotated[float, Field(ge=1, le=31 * _DAY_S)] = _DAY_S
    """Seconds from one low of the rate to the next (a sinusoid); 86,400 is a day."""
    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How far the rate goes up and down, as a share of `rate`: 0.6 is from 0.4 to 1.6 times."""
    start: Annotated[float, Field(ge=0, le=31 * _DAY_S)] = 0.0
    """How many seconds after the low of the rate the trace begins."""
    isl: _Tokens
    """The prompts' median length. They are log-normal: the mean is isl · exp(isl-sigma² ÷ 2)."""
    isl_sigma: _Spread
    """Their spread: standard deviation of the natural logarithm. 0: all alike."""
    isl_max: _Tokens
    """Longer ones are cut to this."""
    osl: _Tokens
    """The answers' median length."""
    osl_sigma: _Spread
    """Their spread."""
    osl_max: _Tokens
    """Longer ones are cut to this."""
    reuse: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of all prompt tokens that an endless cache would have, from prompts that go on from an earlier one.
    As far as lengths allow: where they vary as those of `chat`, 0.7 at most."""
    think: Annotated[float, Field(ge=0, le=_DAY_S)] = 60.0
    """Mean seconds between a prompt and the one that goes on from it; at least half of it."""
    system: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Tokens with which new conversations begin, in whole blocks of 512. Shared ones count for `reuse`."""
    systems: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How many different beginnings there are; the n-th is taken 1/n times as often as the first."""

    @model_validator(mode="after")
    def _check_size(self) -> GeneratorOptions:
        for name in ("isl", "osl"):
            median, most = getattr(self, name), getattr(self, f"{name}_max")
            if median > most:
                raise ValueError(f"{name} is the median, {median}, above {name}-max, {most}; set {name}-max as well")
        requests = self.rate * self.duration
        if requests < 1:
            raise ValueError(f"rate × duration is {requests:g} requests; at least 1 is needed")
        if requests > REQUESTS_MAX:
            raise ValueError(f"rate × duration is {requests:,.0f} requests; at most {REQUESTS_MAX:,} are made")
        if requests * self.isl > PROMPT_TOKENS_MAX:
            tokens = requests * self.isl
            raise ValueError(
                f"rate × duration × isl is {tokens:.1e} prompt tokens; at most {PROMPT_TOKENS_MAX:.0e} are made"
            )
        return self


KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "chat": {
            "rate": 3.4,
            "cv": 1.5,
            "isl": 6_900,
            "isl_sigma": 1.055,
            "isl_max": 131_072,
            "osl": 268,
            "osl_sigma": 0.7,
            "osl_max": 2_000,
            "reuse": 0.4,
            "system": 512,
        },
        "code": {
            "rate": 2.57,
            "cv": 2.0,
            "isl": 1_500,
            "isl_sigma": 0.96,
            "isl_max": 8_192,
            "osl": 13,
            "osl_sigma": 1.24,
            "osl_max": 2_000,
        },
        "sin": {
            "duration": 600.0,
            "rate": 12.5,
            "cv": 1.0,
            "period": 150.0,
            "amplitude": 0.6,
            "isl": 3_000,
            "isl_sigma": 0.0,
            "isl_max": 131_072,
            "osl": 150,
            "osl_sigma": 0.0,
            "osl_max": 2_000,
        },
    }
)
"""The kinds of service, and where each differs from the defaults of `GeneratorOptions`."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A trace to be made: `str` is the word for it, as short as it can be written."""

    kind: str
    options: GeneratorOptions

    def __str__(self) -> str:
        usual = GeneratorOptions(**KINDS[self.kind])
        given = {name: value for name, value in self.options if value != getattr(usual, name)}
        return ",".join([self.kind, *(f"{_key(name)}={_number(value)}" for name, value in given.items())])


def _key(name: str) -> str:
    return name.replace("_", "-")


def _number(value: float) -> str:
    """As it can be read back: 60 rather than 60.0."""
    return repr(value).removesuffix(".0")


def parse_generated(text: str) -> Generated:
    """`chat`, or `code,rate=20,isl-max=4096`. Raises `BadGenerate` naming what is wrong."""
    kind, *parts = (word.strip() for word in text.split(","))
    if kind not in KINDS:
        raise BadGenerate(f"--generate {kind!r} is no kind of load; one of {listing(KINDS)}{nearest(kind, KINDS)}")
    given: dict[str, float | str] = {}
    for word in parts:
        key, equals, value = (part.strip() for part in word.partition("="))
        name = key.replace("-", "_")
        if not equals or not key or not value:
            raise BadGenerate(f"--generate: {word!r} is no KEY=VALUE, such as rate=2.5")
        if name in given:
            raise BadGenerate(f"--generate: {key} is given twice; keep one")
        if name not in GeneratorOptions.model_fields:
            known = [_key(field) for field in GeneratorOptions.model_fields]
            raise BadGenerate(f"--generate: unknown key {key!r}; one of {listing(known)}{nearest(key, known)}")
        given[name] = value
    try:
        return Generated(kind, validate_section(GeneratorOptions, "--generate", {**KINDS[kind], **given}))
    except ConfigError as error:
        raise BadGenerate(str(error)) from None


# --- arrivals
# When requests come: gaps of a Gamma distribution, on a clock that runs as fast as the rate is high.

_CLOSE_S = 1e-7
_STEPS_MAX = 200
_CLOCK_CV = 1e-3
"""Below it gaps differ by less than a thousandth: they are all alike, and no shape becomes infinite."""


def arrivals(options: GeneratorOptions, rng: Random) -> Iterator[float]:
    """Seconds, ascending from 0, below `duration`.

    The gaps have a mean of one *expected* request. A gap lasts until the sinusoid has had so many: that stretches them
    where the rate is low, and leaves their coefficient of variation as it is.
    """
    shape = 1 / options.cv**2 if options.cv >= _CLOCK_CV else 0.0
    at_s, expected = 0.0, 0.0
    while at_s < options.duration:
        yield at_s
        expected += rng.gammavariate(shape, 1 / shape) if shape else 1.0
        at_s = _when(options, expected, at_s)


def expected_by(options: GeneratorOptions, at_s: float) -> float:
    """How many requests the rate promises from the beginning until then."""
    turn = 2 * math.pi / options.period
    swing = math.sin(turn * (at_s + options.start)) - math.sin(turn * options.start)
    return options.rate * (at_s - options.amplitude * swing / turn)


def _when(options: GeneratorOptions, expected: float, after_s: float) -> float:
    """The moment at which so many are expected: Newton's steps, and halves where one leaves what is still possible."""
    if options.amplitude == 0:
        return max(after_s, expected / options.rate)
    turn = 2 * math.pi / options.period
    most_off_s = 2 * options.amplitude / turn
    low_s, high_s = after_s, max(after_s, expected / options.rate + most_off_s)
    at_s = (low_s + high_s) / 2
    for _ in range(_STEPS_MAX):
        miss = expected_by(options, at_s) - expected
        if miss < 0:
            low_s = at_s
        else:
            high_s = at_s
        rate = options.rate * (1 - options.amplitude * math.cos(turn * (at_s + options.start)))
        next_s = at_s - miss / rate if rate > 0 else math.inf
        if not low_s <= next_s <= high_s:
            next_s = (low_s + high_s) / 2
        if abs(next_s - at_s) < _CLOSE_S:
            return next_s
        at_s = next_s
    return at_s


# --- Shared prefixes: common system prompts, and conversations that continue their own last prompt.

OPEN_MAX = 50_000
"""Conversations that may go on are remembered up to so many: an endless trace needs no endless memory."""
FORGET_S = 600.0
"""A conversation that has not gone on for so long after its pause has ended.

In a chat service 80 % of what is reused is reused within ten minutes (Wang et al., "KVCache Cache in the Wild",
arXiv:2506.02634).
"""
LONGEST_SHARE = 0.25
"""One of the longest quarter of the conversations that fit goes on.

With all of them, two of three prompts of `chat` go on from another to come to its reuse of 40 %; with the longest alone
one of six. In Mooncake's conversation trace 38 % do.
"""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """One that may go on: at which length at the least, with which full blocks, and from when on."""

    length: int
    ids: tuple[int, ...]
    ready_s: float


class Prefixes:
    """Gives each prompt the ids of its blocks, so that about `reuse` of all tokens have been there before.

    While the share is below that, a conversation goes on whose pause is over and whose last prompt and answer the new
    prompt has room for. So lengths stay as they were drawn. The last token of a prompt is computed by every engine,
    and counts as new.
    """

    def __init__(self, options: GeneratorOptions, rng: Random) -> None:
        self._options = options
        self._rng = rng
        self._system_blocks = options.system // HASH_BLOCK_TOKENS
        self._popularity = list(accumulate(1 / number for number in range(1, options.systems + 1)))
        self._seen_of_system = [0] * options.systems
        self._new_ids = count(self._system_blocks * options.systems)
        self._numbers = count()
        self._pausing: list[tuple[float, int, _Conversation]] = []
        self._by_length: list[tuple[int, int]] = []
        self._ready: OrderedDict[int, _Conversation] = OrderedDict()
        self._tokens = 0
        self._reused = 0

    def ids_of(self, at_s: float, input_length: int, output_length: int) -> tuple[int, ...]:
        """One id for each 512 tokens begun. Calls come in the order of time."""
        self._wake(at_s)
        self._tokens += input_length
        before: tuple[int, ...] | None = None
        if self._reused < self._options.reuse * self._tokens:
            before = self._go_on(input_length)
        if before is None:
            before = self._begin(input_length)
        else:
            self._reused += len(before) * HASH_BLOCK_TOKENS
        new = math.ceil(input_length / HASH_BLOCK_TOKENS) - len(before)
        ids = (*before, *(next(self._new_ids) for _ in range(new)))
        if self._options.reuse:
            self._remember(at_s, input_length, output_length, ids)
        return ids

    def _wake(self, at_s: float) -> None:
        while self._pausing and self._pausing[0][0] <= at_s:
            _, number, conversation = heapq.heappop(self._pausing)
            insort(self._by_length, (conversation.length, number))
            self._ready[number] = conversation
        while self._ready and next(iter(self._ready.values())).ready_s < at_s - FORGET_S:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        number, conversation = self._ready.popitem(last=False)
        del self._by_length[bisect_left(self._by_length, (conversation.length, number))]

    def _go_on(self, input_length: int) -> tuple[int, ...] | None:
        """The full blocks of a conversation's last prompt, or None where none has room in the new one."""
        fitting = bisect_right(self._by_length, (input_length, math.inf))
        if fitting == 0:
            return None
        position = int(fitting * (1 - LONGEST_SHARE * self._rng.random()))
        _, number = self._by_length.pop(min(position, fitting - 1))
        return self._ready.pop(number).ids

    def _begin(self, input_length: int) -> tuple[int, ...]:
        """The blocks of a system prompt, as far as the prompt fills them."""
        blocks = min(self._system_blocks, input_length // HASH_BLOCK_TOKENS)
        if blocks == 0:
            return ()
        (which,) = self._rng.choices(range(self._options.systems), cum_weights=self._popularity)
        seen = min(blocks, self._seen_of_system[which], (input_length - 1) // HASH_BLOCK_TOKENS)
        self._reused += seen * HASH_BLOCK_TOKENS
        self._seen_of_system[which] = max(blocks, self._seen_of_system[which])
        first = which * self._system_blocks
        return tuple(range(first, first + blocks))

    def _remember(self, at_s: float, input_length: int, output_length: int, ids: tuple[int, ...]) -> None:
        """The next prompt holds this one, its answer, and something new."""
        if len(self._pausing) + len(self._ready) >= OPEN_MAX:
            if not self._ready:
                return
            self._forget_oldest()
        pause_s = self._options.think * (0.5 + 0.5 * self._rng.expovariate(1.0))
        conversation = _Conversation(
            input_length + output_length + 1, ids[: input_length // HASH_BLOCK_TOKENS], at_s + pause_s
        )
        heapq.heappush(self._pausing, (conversation.ready_s, next(self._numbers), conversation))


# --- requests
# Times, lengths and shared beginnings, put together into requests.


def generate(options: GeneratorOptions) -> Iterator[TraceRequest]:
    """Yield the requests in the order of their times, the first at 0 s. Equal options give equal requests.

    Random numbers come from `random.Random` (Mersenne Twister), which gives the same `random()` on every platform and
    Python. A test would notice a change of its Gamma or normal variates. Times are whole milliseconds and lengths whole
    tokens, so a platform's last bits of `sin` and `exp` do not show. Times, lengths and prefixes have a generator each,
    so a change of `isl` moves no arrival.
    """
    prompts, answers = (Random(f"{options.seed}/{what}") for what in ("isl", "osl"))
    prefixes = Prefixes(options, Random(f"{options.seed}/prefixes"))
    for at_s in arrivals(options, Random(f"{options.seed}/arrivals")):
        rounded_s = round(at_s * 1000) / 1000
        isl = _length(prompts, options.isl, options.isl_sigma, options.isl_max)
        osl = _length(answers, options.osl, options.osl_sigma, options.osl_max)
        yield TraceRequest(rounded_s, isl, osl, prefixes.ids_of(rounded_s, isl, osl))


def _length(rng: Random, median: int, sigma: float, most: int) -> int:
    if sigma == 0:
        return median
    return max(1, min(most, round(rng.lognormvariate(math.log(median), sigma))))
