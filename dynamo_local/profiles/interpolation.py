"""How long a pass of an engine takes: `PerfModel` is the question; a profile, or fixed numbers for tests, answers.

All durations are in seconds, all lengths in tokens.

A pass lasts `launch_s` (if a prompt starts in it) + the sum of `prefill_s` over its chunks + `decode_s` of its decode
rows, so a prompt alone takes exactly the profile's TTFT for its length, in however many chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_local.core.dispatch.targets import Perf
from dynamo_local.errors import ConfigError
from dynamo_local.profiles.curves import Grid, Line, surface
from dynamo_local.profiles.reading import lines_of, npz_arrays, read_profile


class PerfModel(Perf, Protocol):
    """What decisions are made by (`Perf`), and what an engine that is modelled needs besides."""

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        """`decode_s` of so many passes in a row, each of which adds a token to every sequence: the same bits."""
        ...


@dataclass(frozen=True, slots=True)
class FixedModel:
    """Linear numbers for tests: a known answer to "when?"."""

    prefill_ms_per_token: float = 0.02
    decode_ms: float = 5.0
    decode_ms_per_kv_token: float = 0.0
    launch_ms: float = 0.0
    max_kv_tokens: int = 1_000_000

    @property
    def launch_s(self) -> float:
        return self.launch_ms / 1000

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        return new_tokens * self.prefill_ms_per_token / 1000

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        return (self.decode_ms + active_kv_tokens * self.decode_ms_per_kv_token) / 1000

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        ends = range(active_kv_tokens, active_kv_tokens + batch * passes, batch)
        return [self.decode_s(batch, kv_tokens, kv_tokens / batch) for kv_tokens in ends]


class ProfileModel:
    """A measured or estimated engine: TTFT over prompt length, ITL over (active KV tokens, mean context length).

    Prefill right of the profile goes on linearly (mean slope of its upper half); `launch_s` is the curve continued down
    to 0 tokens. Decode outside the profile is the value at its edge, in both directions.
    """

    def __init__(self, prefill_ms: Line, decode_ms: Grid, max_kv_tokens: int) -> None:
        self._prefill_ms = prefill_ms
        self._decode_ms = decode_ms
        self._max_kv_tokens = max_kv_tokens
        self._launch_ms = max(0.0, prefill_ms(0))

    @property
    def max_kv_tokens(self) -> int:
        return self._max_kv_tokens

    @property
    def launch_s(self) -> float:
        return self._launch_ms / 1000

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        return (self._above_launch(context_tokens + new_tokens) - self._above_launch(context_tokens)) / 1000

    def _above_launch(self, tokens: int) -> float:
        return max(0.0, self._prefill_ms(tokens) - self._launch_ms)

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        return self._decode_ms(active_kv_tokens, mean_context) / 1000

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        return [ms / 1000 for ms in self._decode_ms.along(batch, active_kv_tokens, passes)]

    def ttft_s(self, prompt_tokens: int) -> float:
        """Time to first token, in seconds, of a prompt of that many tokens that is alone in an idle engine."""
        return self.launch_s + self.prefill_s(0, prompt_tokens)

    def itl_s(self, active_kv_tokens: int, mean_context: float) -> float:
        """Inter-token latency, in seconds, where all running sequences together hold `active_kv_tokens` tokens of KV
        and are `mean_context` tokens long on average."""
        return self._decode_ms(active_kv_tokens, mean_context) / 1000

    @classmethod
    def load(cls, profile: str) -> ProfileModel:
        """From a profile's name (`dynamo_H200_TP1P_TP1D`) or its folder. Raises `ConfigError`."""
        read = read_profile(profile)
        prefill, decode = read.prefill, read.decode
        exact = read.folder / "mocker_exact.npz"
        if exact.is_file():
            return cls(*_exact(exact), decode.max_kv_tokens)
        prefill_ms = Line(prefill.isl, prefill.ttft_ms, extend_left=True)
        return cls(prefill_ms, surface(lines_of(decode, decode.itl_ms), decode.max_kv_tokens), decode.max_kv_tokens)


def _exact(path: Path) -> tuple[Line, Grid]:
    try:
        grid = npz_arrays(path)
        axes = grid["decode_active_kv_tokens"], grid["decode_context_length"]
        prefill_ms = Line(grid["prefill_isl"], grid["prefill_ttft_ms"], extend_left=True)
        return prefill_ms, Grid(*axes, grid["decode_itl"])
    except (OSError, KeyError, ValueError, EOFError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"the profile {path} cannot be used: {type(error).__name__}: {error}") from error
