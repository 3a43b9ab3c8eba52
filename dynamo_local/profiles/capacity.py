"""What a planner asks of a profile, under the names of Dynamo's interpolators: latency and throughput of one engine at
a load, and the load that it can take within a target.

    prefill, decode = interpolators("dynamo_H200_TP1P_TP1D")
    prefill.interpolate_ttft(3000).value                 # ms, of a prompt that is alone
    prefill.interpolate_thpt_per_gpu(3000).value         # prompt tokens/s/GPU
    decode.interpolate_itl(40, 3150).value               # ms, with 40 requests of 3150 tokens in the engine
    decode.find_best_throughput_per_gpu(10, 3150).value  # tokens/s/GPU with an ITL of at most 10 ms

More load never takes less time: TTFT over the prompt's length and ITL over the KV in use are made non-decreasing where
a measurement falls (`core.isotonic`). Throughput is not interpolated by itself, but follows from latency: prompts
one after the other, and for decode the requests that run, divided by ITL (Little's law).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from dynamo_local.errors import ConfigError
from dynamo_local.profiles.curves import Line, surface
from dynamo_local.profiles.reading import DecodePoints, PrefillPoints, Profile, lines_of, read_profile


class Estimate(NamedTuple):
    """A value; `extrapolated` where nothing as long, or as loaded, was measured."""

    value: float
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class Best:
    """The most that a decode engine does within an ITL: `value` in tokens/s/GPU, with `concurrency` requests in it, at
    `itl_ms`. Not `attainable`: a single request is slower than the target, and this is what one request gets.
    """

    value: float
    concurrency: float
    itl_ms: float
    attainable: bool
    extrapolated: bool


class PrefillInterpolator:
    """One prompt after the other."""

    def __init__(self, points: PrefillPoints) -> None:
        self._first_isl, self._last_isl = points.isl[0], points.isl[-1]
        self._first_ms = points.ttft_ms[0]
        self._ttft_ms = Line(points.isl, points.ttft_ms, extend_left=True)
        # What a GPU does of the engine's throughput: less with more GPUs, more with attention in parallel.
        self._share = median(
            thpt * ttft_ms / isl / 1000
            for isl, ttft_ms, thpt in zip(points.isl, points.ttft_ms, points.thpt_per_gpu, strict=True)
        )

    def interpolate_ttft(self, isl: float) -> Estimate:
        """Milliseconds until the first token of a prompt of `isl` tokens (above 0) that waits for nobody."""
        ttft_ms = self._ttft_ms(isl)
        if isl < self._first_isl:  # the first segment, continued, may end below 0
            ttft_ms = max(ttft_ms, self._first_ms * isl / self._first_isl)
        return Estimate(ttft_ms, not self._first_isl <= isl <= self._last_isl)

    def interpolate_thpt_per_gpu(self, isl: float) -> Estimate:
        """Prompt tokens per second and GPU, with prompts of `isl` tokens one after the other."""
        ttft_ms, extrapolated = self.interpolate_ttft(isl)
        return Estimate(isl / ttft_ms * 1000 * self._share, extrapolated)


class DecodeInterpolator:
    """Many requests at once, told apart by how many there are and how long they are on average."""

    def __init__(self, points: DecodePoints) -> None:
        self.max_kv_tokens = points.max_kv_tokens
        itls = lines_of(points, points.itl_ms)
        self._itl_ms = surface(itls, points.max_kv_tokens)
        # Requests that run, per GPU, by Little's law: fewer than there are where the engine lets some wait.
        running = [thpt * itl / 1000 for thpt, itl in zip(points.thpt_per_gpu, points.itl_ms, strict=True)]
        lines = {context: [(0.0, 0.0), *measured] for context, measured in lines_of(points, running).items()}
        self._running = surface(_once(lines), points.max_kv_tokens)
        self._contexts = sorted(itls)
        self._most_kv = [max(kv for kv, _ in itls[context]) for context in self._contexts]

    def interpolate_itl(self, concurrency: float, context_length: float) -> Estimate:
        """Milliseconds per token with `concurrency` requests of `context_length` tokens each in one engine."""
        kv_tokens = self._kv_tokens(concurrency, context_length)
        return Estimate(self._itl_ms(kv_tokens, context_length), self._beyond(kv_tokens, context_length))

    def interpolate_thpt_per_gpu(self, concurrency: float, context_length: float) -> Estimate:
        """Tokens per second and GPU with those requests in one engine."""
        kv_tokens = self._kv_tokens(concurrency, context_length)
        itl_ms, extrapolated = self.interpolate_itl(concurrency, context_length)
        return Estimate(self._running(kv_tokens, context_length) / itl_ms * 1000, extrapolated)

    def find_best_throughput_per_gpu(self, itl: float, context_length: float) -> Best:
        """The most that one engine does with an ITL of at most `itl` ms, at loads that were measured. A stricter target
        never gives more."""
        alone = self.interpolate_itl(1, context_length)
        if not alone.value <= itl:
            only = self.interpolate_thpt_per_gpu(1, context_length)
            return Best(only.value, 1.0, alone.value, False, only.extrapolated)
        # Between two points of the axis throughput is a quotient of two straight lines, which has its maximum at an
        # end: so the best is at a point, at the highest load, or where the target is met exactly.
        highest = max(self._measured_to(context_length), context_length)
        axis = [kv for kv in self._itl_ms.x if kv < highest] + [highest]
        itls = [self._itl_ms(kv, context_length) for kv in axis]
        met = sum(value <= itl for value in itls)
        points = list(zip(axis[:met], itls[:met], strict=True))
        if met < len(axis):
            share = (itl - itls[met - 1]) / (itls[met] - itls[met - 1])
            points.append((axis[met - 1] + (axis[met] - axis[met - 1]) * share, itl))
        loads = [(self._running(kv, context_length) / itl_ms * 1000, kv, itl_ms) for kv, itl_ms in points]
        value, kv, itl_ms = max(loads, key=lambda load: load[0])
        return Best(value, kv / context_length, itl_ms, True, alone.extrapolated)

    def _kv_tokens(self, concurrency: float, context_length: float) -> float:
        return min(concurrency * context_length, float(self.max_kv_tokens))

    def _beyond(self, kv_tokens: float, context_length: float) -> bool:
        """Whether it is outside of what was measured: shorter, longer, or more loaded than both neighbours were."""
        inside = self._contexts[0] <= context_length <= self._contexts[-1]
        return not inside or kv_tokens > self._measured_to(context_length) * (1 + 1e-9)

    def _measured_to(self, context_length: float) -> float:
        """The most KV tokens at that context, between those of its neighbours; outside of them, the nearest's."""
        contexts, most = self._contexts, self._most_kv
        right = min(max(1, bisect_right(contexts, context_length)), len(contexts) - 1)
        share = (context_length - contexts[right - 1]) / (contexts[right] - contexts[right - 1])
        return most[right - 1] + (most[right] - most[right - 1]) * min(1.0, max(0.0, share))


def _once(lines: dict[float, list[tuple[float, float]]]) -> dict[float, list[tuple[float, float]]]:
    """Without a second point at 0 KV tokens."""
    return {context: sorted(dict(points).items()) for context, points in lines.items()}


def interpolators(profile: str | Profile) -> tuple[PrefillInterpolator, DecodeInterpolator]:
    """Both, of a profile's name or folder, or of one that is read. Raises `ConfigError` for one that cannot be used, or
    that has no throughput per GPU."""
    read = read_profile(profile) if isinstance(profile, str) else profile
    for path, points, name in (
        (read.files[0], read.prefill, "prefill_thpt_per_gpu"),
        (read.files[1], read.decode, "z_thpt_per_gpu"),
    ):
        if not points.thpt_per_gpu:
            raise ConfigError(
                f"the profile {path} has no array {name}: a planner cannot size by it, an engine can run by it"
            )
    return PrefillInterpolator(read.prefill), DecodeInterpolator(read.decode)
