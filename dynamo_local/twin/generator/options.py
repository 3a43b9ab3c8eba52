"""What a generated trace is made from, and three services whose published figures give the defaults.

`chat` follows the conversation trace of Kimi, a chat service (Qin et al., "Mooncake: Trading More Storage for Less
Computation", FAST '25, and the trace that its authors published with it): 12,031 requests in 3,537 s, 12,035 prompt
tokens and 343 answer tokens in the mean, and one block of 512 tokens with which every prompt begins. The median of its
prompts is 6,909 tokens, and an endless cache has 39.8 % of the tokens (llmtrafficlens 0.11). Its times are whole
multiples of three seconds, so `cv` is read from counts: their variance is 2.1 times their mean in windows of 10 s and
2.9 times in windows of 60 s, and for such arrivals that ratio goes to cv². The spread of the answers, 0.7, is ours;
their median is the one that then gives the published mean.

`code` follows the code completion service of Patel et al., "Splitwise" (ISCA '24, section III): medians of 1,500 and 13
tokens; and its data set, the Azure LLM inference trace 2023: 8,819 requests at 2.57 per second, 95 % of the prompts
below 7,302 tokens, which gives their spread. The answers' spread, 1.24, and `cv`, 2, are ours: BurstGPT (Wang et al.,
arXiv:2401.17644) finds real services burstier than Poisson and models them by a Gamma distribution, as is done here.
Nothing is published about the prefixes that those prompts share, so they share none.

`sin` is the load of Dynamo's load-planner benchmark: Poisson arrivals between 5 and 20 per second with a period of
150 s, prompts of 3,000 tokens and answers of 150.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.sdk.checks import listing, nearest
from dynamo_local.sdk.settings import validate_section

REQUESTS_MAX = 5_000_000
"""A trace may have so many requests, by its rate and duration."""
PROMPT_TOKENS_MAX = 10**11
"""And so many prompt tokens, by its requests and their median length: about a month of `chat`."""

_DAY_S = 86_400.0
_Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
_Spread = Annotated[float, Field(ge=0, le=2)]


class BadGenerate(BadInput):
    """What was asked of the generator cannot be; the message names the key."""

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
    """Tokens with which new conversations begin, in whole blocks of 512. What they share counts for `reuse`."""
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
            raise ValueError(f"rate × duration is {requests:g} requests; it must be 1 or more")
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
        told = {name: value for name, value in self.options if value != getattr(usual, name)}
        return ",".join([self.kind, *(f"{_key(name)}={_number(value)}" for name, value in told.items())])


def _key(name: str) -> str:
    return name.replace("_", "-")


def _number(value: float) -> str:
    """As it can be read back: 60 rather than 60.0."""
    return repr(value).removesuffix(".0")


def parse_generated(text: str) -> Generated:
    """`chat`, or `code,rate=20,isl-max=4096`. Raises `BadGenerate` naming what is wrong."""
    kind, *words = (word.strip() for word in text.split(","))
    if kind not in KINDS:
        raise BadGenerate(f"--generate {kind!r} is no kind of load; one of {listing(KINDS)}{nearest(kind, KINDS)}")
    given: dict[str, float | str] = {}
    for word in words:
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
