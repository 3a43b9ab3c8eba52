"""Options of the simulated engine, checked once, at the edge. docs/sim-engine.md explains each."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dynamo_local.core.gpus import simulated_uuid
from dynamo_local.engines.sim.tokens import (
    DEFAULT_MEAN_OUTPUT_TOKENS,
    DEFAULT_TOKEN_HIGH,
    DEFAULT_TOKEN_LOW,
    TokenStream,
    natural_length,
)
from dynamo_local.errors import ConfigError
from dynamo_local.ports import SamplingParams, TokenLogprobs
from dynamo_local.profile.reading import DEFAULT_PROFILE

INSTANT_S = 1e-6
"""A pass or a transfer of at most so long is over at once (`speed` may be a million). A task that sleeps for it would
cost thirty times as much, and the clock of uvloop shows milliseconds."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The options of a simulated engine. Names contain the units. None: from the profile, or made on start.

    Raises `ConfigError` naming the option where a value cannot be used.
    """

    model: str = "sim"
    profile: str = DEFAULT_PROFILE
    """A profile that ships with the package, or the path of a profile folder."""
    speed: float = 1.0
    """Divides every modelled duration: passes, KV transfers and the start-up. Leases and timeouts stay real."""
    start_up_s: float = 0.0
    block_size: int = 64
    """Tokens per KV block."""
    num_gpu_blocks: int | None = None
    """KV blocks; None: the profile's `max_kv_tokens` // `block_size`."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """The token budget of one pass, prefill chunks and decodes together."""
    max_model_len: int | None = None
    """Prompt plus output; None: 131,072, or what the KV cache holds if that is less."""
    token_low: int = DEFAULT_TOKEN_LOW
    token_high: int = DEFAULT_TOKEN_HIGH
    """Output ids lie in [token_low, token_high): choose ids that the tokenizer in use turns into plain text."""
    mean_output_tokens: int = DEFAULT_MEAN_OUTPUT_TOKENS
    accept_length: float = 1.0
    """Speculative decoding: mean number of tokens per decode pass and sequence. 1: no speculation."""
    seed: int = 0
    kv_bytes_per_token: int = 131_072
    """Llama-3.1-8B: 32 layers x (K and V) x 8 heads x 128 x 2 bytes."""
    kv_transfer_bytes_per_s: float = 64e9
    """PCIe 5 x16 peak: an assumption, not a measurement."""
    kv_transfer_latency_s: float = 0.001
    kv_lease_duration_s: float = 30.0
    """How long handed-over KV waits to be pulled: vLLM's `kv_lease_duration`."""
    kv_pull_timeout_s: float = 10.0
    """Past this a pull that has not ended is a `KvTransferError`."""
    engine_id: str | None = None
    fail_after_requests: int | None = None
    """The engine dies as soon as so many requests have come: for tests of what follows."""
    sleep_s: float = 0.1
    wake_s: float = 0.5
    """How long a wake from level 1 takes: 0.1 to 0.8 s of small models, 3 to 6 s of large ones."""
    wake_level2_s: float = 5.0
    """The same from level 2, which reads the weights again."""
    sleep_residue_bytes: int = 1_500_000_000
    """GPU memory that it keeps while it sleeps: the CUDA context, and what its allocator does not give back."""
    sleep_host_bytes: int = 0
    """Main memory that level 1 says it takes; none is. The weights of an 8B model in 16 bits are 16_000_000_000."""
    sleep_growth_bytes: int = 0
    """Memory that each wake leaves behind: for tests of what follows."""
    corrupt_after_wakes: int | None = None
    """From that wake on (the rehearsal's is the first) it answers otherwise: for tests of what follows."""
    slow_gpu: int | None = None
    """The simulated GPU of that index takes `slow_factor` times as long: for tests of who notices, as the next ones."""
    slow_factor: float = 1.5
    neighbour_every_s: float = 0.0
    """So often (0: never) something else uses the GPU for `neighbour_for_s`: passes take `neighbour_factor` times as
    long then. These are real seconds, whatever the speed."""
    neighbour_for_s: float = 0.2
    neighbour_factor: float = 2.0
    drift_per_s: float = 0.0
    """Passes take so much longer, as a share, with each real second since the start."""
    coalesce_passes: bool = False
    """Wake once per run of quiet passes, not once per pass: for virtual clocks (tokens of a run come together)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        rates = ("speed", "kv_transfer_bytes_per_s", "kv_pull_timeout_s", "kv_lease_duration_s")
        for name in (*rates, "slow_factor", "neighbour_factor"):
            _require(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        _require("accept_length", self.accept_length, 1 <= self.accept_length <= 16, "1 to 16")
        _require("slow_gpu", self.slow_gpu, self.slow_gpu is None or self.slow_gpu >= 0, "the index of a GPU")
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "mean_output_tokens",
            "kv_bytes_per_token",
        ):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("num_gpu_blocks", "max_model_len", "fail_after_requests", "corrupt_after_wakes"):
            value = getattr(self, name)
            _require(name, value, value is None or value >= 1, "1 or more")
        for name in (
            "start_up_s",
            "kv_transfer_latency_s",
            "sleep_s",
            "wake_s",
            "wake_level2_s",
            "sleep_residue_bytes",
            "sleep_host_bytes",
            "sleep_growth_bytes",
            "neighbour_every_s",
            "neighbour_for_s",
            "drift_per_s",
        ):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        _require("token_low", self.token_low, self.token_low >= 0, "0 or more")
        _require("token_high", self.token_high, self.token_low < self.token_high <= 2**32, "above token_low")
        _require("seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit number")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SimOptions:
        """From a configuration section; keys with hyphens or underscores. Raises `ConfigError`."""
        allowed = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        for key, value in options.items():
            name = str(key).replace("-", "_")
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; the options are: {', '.join(sorted(allowed))}"
                raise ConfigError(f"the sim engine has no option {key!r}{hint}")
            values[name] = value
        return cls(**values)

    def transfer_s(self, num_tokens: int) -> float:
        """How long the KV of so many tokens takes from one engine to another, in seconds."""
        size_bytes = num_tokens * self.kv_bytes_per_token
        return (self.kv_transfer_latency_s + size_bytes / self.kv_transfer_bytes_per_s) / self.speed


def _check_type(name: str, annotation: str, value: Any) -> None:
    if value is None and annotation.endswith("| None"):
        return
    kind = annotation.removesuffix("| None").strip()
    right = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        "str": isinstance(value, str) and bool(value),
    }[kind]
    if not right:
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}[kind]
        raise ConfigError(f"the sim engine's option {name!r} must be {wanted}, not {value!r}")


def _require(name: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"the sim engine's option {name!r} must be {rule}, not {value!r}")


# --- Injected faults: a GPU whose passes last longer than its profile says. Tests use them to see which part notices.
# Pure, except the one function that looks up the GPU of this process.


@dataclass(frozen=True, slots=True)
class Faults:
    """`slow`: every pass takes so many times as long. `neighbour_factor`: that many times for the first
    `neighbour_for_s` of every `neighbour_every_s`. `drift_per_s`: so much longer, as a share, with each second.
    All seconds are real ones, since `began_s` of the engine's clock."""

    began_s: float
    slow: float = 1.0
    neighbour_every_s: float = 0.0
    neighbour_for_s: float = 0.0
    neighbour_factor: float = 1.0
    drift_per_s: float = 0.0

    def factor(self, at_s: float) -> float:
        """So many times as long takes a pass that begins at that moment."""
        since_s = max(0.0, at_s - self.began_s)
        factor = self.slow * (1.0 + self.drift_per_s * since_s)
        if self.neighbour_every_s and since_s % self.neighbour_every_s < self.neighbour_for_s:
            factor *= self.neighbour_factor
        return factor


def faults_here(options: SimOptions, began_s: float, environ: Mapping[str, str] | None = None) -> Faults | None:
    """Those of the engine in this process, whose GPUs `CUDA_VISIBLE_DEVICES` names; None: nothing is wrong."""
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "").split(",")
    slow = options.slow_gpu is not None and simulated_uuid(options.slow_gpu) in visible
    if not slow and not options.neighbour_every_s and not options.drift_per_s:
        return None
    return Faults(
        began_s,
        options.slow_factor if slow else 1.0,
        options.neighbour_every_s,
        options.neighbour_for_s,
        options.neighbour_factor,
        options.drift_per_s,
    )


# --- Effects of sampling parameters on the simulated output: seed, script, logprobs. Numbers, like tokens, are
# functions of the prompt, the seed and the position. So every process computes the same.


def seeded(digest: bytes, sampling: SamplingParams) -> bytes:
    """The key of the output. A seed gives another one, except where nothing is left to chance (temperature 0)."""
    if sampling.seed is None or sampling.temperature == 0:
        return digest
    return blake2b((sampling.seed % 2**64).to_bytes(8, "little"), digest_size=16, key=digest).digest()


def answer_of(
    digest: bytes, sampling: SamplingParams, options: SimOptions, generated: int = 0
) -> tuple[TokenStream, int]:
    """The tokens of the answer behind the first `generated`, and after how many of them it ends by itself."""
    key = seeded(digest, sampling)
    script = () if sampling.extras is None else sampling.extras.script
    stream: TokenStream
    if script:
        stream = ScriptedStream(key, script, options.token_low, options.token_high, generated)
    else:
        low, high = options.token_low, options.token_high
        stream = TokenStream(key, token_low=low, token_high=high, skipped=generated)
    stream.prompt_digest = digest
    natural = len(script) or natural_length(key, options.mean_output_tokens)
    return stream, max(1, natural - generated)


class ScriptedStream(TokenStream):
    """The script's tokens first."""

    __slots__ = ("_script",)

    def __init__(self, digest: bytes, script: tuple[int, ...], token_low: int, token_high: int, skipped: int) -> None:
        super().__init__(digest, token_low=token_low, token_high=token_high, skipped=skipped)
        self._script = script[skipped:]

    def take(self, first: int, count: int) -> tuple[int, ...]:
        head = self._script[first : first + count]
        return head + super().take(first + len(head), count - len(head))


def logprobs_of(tokens: TokenStream, token_ids: Sequence[int], first: int, alternatives: int) -> list[TokenLogprobs]:
    """For each token itself and the likeliest others, most likely first: the token has 0.5 to 0.98, and the others half
    of what the one before left. Positions below 0 are the prompt's."""
    return [_at(tokens, token, first + n, alternatives) for n, token in enumerate(token_ids)]


def _at(tokens: TokenStream, token: int, position: int, alternatives: int) -> TokenLogprobs:
    key, at = (tokens.digest, position + tokens.skipped) if position >= 0 else (tokens.prompt_digest, position)
    draw = blake2b(b"logprobs %d" % at, digest_size=8, key=key).digest()
    chosen = 0.5 + 0.48 * int.from_bytes(draw[:4], "little") / 2**32
    found = [(token, math.log(chosen))]
    left = 1 - chosen
    for other in _others(tokens, token, int.from_bytes(draw[4:], "little"), alternatives - 1):
        left /= 2
        found.append((other, math.log(left)))
    return tuple(found)


def _others(tokens: TokenStream, token: int, draw: int, count: int) -> Iterator[int]:
    low, span = tokens.low, tokens.span
    for n in range(min(count, span - 1)):
        # Steps of one from a start that is drawn: no two are the same, and none is the token itself.
        other = low + (draw + n) % span
        if low <= token < low + span and (token - low - draw) % span <= n:
            other = low + (draw + n + 1) % span
        yield other
