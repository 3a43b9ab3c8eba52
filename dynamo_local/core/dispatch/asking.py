"""What is asked about one prompt, what was chosen, and what a decode worker keeps of a request on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dynamo_local.core.dispatch.tally import Why

Way = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt. `waited_s` is since the request came."""

    prompt_tokens: int
    cached_tokens: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done, and why: estimates in seconds from now to the first token, costs in expected misses.

    `start_by_s` is when (same clock as `decide`'s) a prefill worker has to begin for the target to be kept; None: there
    is no target. `remote_s` and `local_s` are None where that way is closed. `estimated_s` is the uncorrected estimate
    behind the chosen way (of a remote one, to the end of its prefill), `behind_s` for how long its KV will then wait
    for prompts that are computed here.
    """

    remote: bool
    reason: str
    local_s: float | None = None
    remote_s: float | None = None
    harmed: float = 0.0
    work_s: float = 0.0
    start_by_s: float | None = None
    fallback: bool = False
    estimated_s: float | None = None
    behind_s: float = 0.0
    why: Why = Why.SOONER

    @property
    def first_token_s(self) -> float | None:
        """The estimate of the chosen way, from now on."""
        return self.remote_s if self.remote else self.local_s


class Promise(NamedTuple):
    """The first token is to come `estimated_s` after `at_s`, and has to within `left_s` (None: there is no target)."""

    way: Way
    estimated_s: float
    at_s: float
    left_s: float | None


@dataclass(slots=True)
class Request:
    """As `core.dispatch.prefilling.DecodeSide` knows it. Times are seconds of the clock that it is told."""

    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    generated: int = 0
    local_tokens: int | None = None
    """Uncached tokens of a prompt that is to be computed here."""
    away_work_s: float | None = None
    """What its prefill elsewhere takes, while it is awaited."""
    estimated_s: float | None = None
    asked_s: float = 0.0
    handed_s: float | None = None
    behind_s: float = 0.0
    """For how long its KV was expected to wait, once there, for the prompts that are computed here."""
    promised: Promise | None = None
    """What was estimated when it went the way that was chosen."""

    @property
    def cached_tokens(self) -> int:
        """Of a prompt that is to be computed here."""
        return self.prompt_tokens - (self.local_tokens or 0)
