"""What is to be kept, and what the estimates are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

DisaggPolicy = Literal["slo", "threshold"]
"""How a decode worker decides where a prompt is prefilled: by what it will cost; by length and queue (the seed's)."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: none. `itl_s` holds for the mean of a request's own gaps between tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, itl_ms: float | None) -> Targets:
        """From milliseconds, as they are configured."""
        return cls(None if ttft_ms is None else ttft_ms / 1000, None if itl_ms is None else itl_ms / 1000)

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.ttft_s is not None or self.itl_s is not None


class Perf(Protocol):
    """How long an engine's passes take, in seconds at speed 1. Pure: the same arguments give the same bits."""

    @property
    def max_kv_tokens(self) -> int:
        """How many tokens the KV cache of this engine holds."""
        ...

    @property
    def launch_s(self) -> float:
        """The fixed part of a prefill in seconds, paid once by a pass in which at least one prompt starts."""
        ...

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        """Seconds to compute `new_tokens` of a prompt behind `context_tokens` whose KV is there already."""
        ...

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        """Seconds for one token of each of `batch` (1 or more) sequences.

        Together they hold `active_kv_tokens` tokens of KV; their mean length is `mean_context` tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """An engine's times at its speed: `speed` divides those of the profile."""

    perf: Perf
    speed: float = 1.0

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """A prompt alone, of which the first `cached_tokens` need not be computed; at least its last token is."""
        cached = max(0, min(cached_tokens, prompt_tokens - 1))
        return (self.perf.launch_s + self.perf.prefill_s(cached, prompt_tokens - cached)) / self.speed

    def itl_s(self, batch: int, kv_tokens: int) -> float:
        """A pass that decodes `batch` sequences with `kv_tokens` together; 0.0 of none."""
        if batch < 1:
            return 0.0
        return self.perf.decode_s(batch, kv_tokens, kv_tokens / batch) / self.speed


@dataclass(frozen=True, slots=True)
class Costs:
    """What decisions are made by: the engine's times, and the targets."""

    timing: Timing
    targets: Targets
