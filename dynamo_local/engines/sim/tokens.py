"""The tokens that the simulated engine "computes": a pure function of the prompt, equal in every process and run.

Token i of the output comes from blake2b(prompt digest, i // 16). So each token is computed without those before it. A
wrong prompt gives other tokens, and a test recognises a wrong stream (`expected_output`).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from dynamo_local.kv_hashes import block_hashes, token_bytes

DEFAULT_TOKEN_LOW = 259
DEFAULT_TOKEN_HIGH = 2048
DEFAULT_MEAN_OUTPUT_TOKENS = 64

_PER_DIGEST = 16
_UNPACK = struct.Struct(f"<{_PER_DIGEST}I").unpack


def prompt_digest(prompt_token_ids: Iterable[int], *, seed: int = 0) -> bytes:
    """16 bytes that stand for the prompt: the identity that a KV hand-off carries, and the key of its tokens."""
    key = seed.to_bytes(8, "little", signed=True)
    return blake2b(token_bytes(prompt_token_ids), digest_size=16, key=key).digest()


class TokenStream:
    """The endless output of one prompt. Ids lie in [token_low, token_high).

    The first `skipped` tokens are left out: a lost worker has generated them.
    """

    __slots__ = ("_chunk", "_chunk_index", "digest", "low", "prompt_digest", "skipped", "span")

    def __init__(self, digest: bytes, *, token_low: int, token_high: int, skipped: int = 0) -> None:
        self.digest = self.prompt_digest = digest
        self.skipped = skipped
        self.low = token_low
        self.span = token_high - token_low
        self._chunk: tuple[int, ...] = ()
        self._chunk_index = -1

    def take(self, first: int, count: int) -> tuple[int, ...]:
        """Tokens first … first + count - 1."""
        low, span = self.low, self.span
        tokens: list[int] = []
        first += self.skipped
        end = first + count
        while first < end:
            index, offset = divmod(first, _PER_DIGEST)
            if index != self._chunk_index:
                raw = blake2b(index.to_bytes(8, "little"), digest_size=64, key=self.digest).digest()
                self._chunk = tuple([low + word % span for word in _UNPACK(raw)])
                self._chunk_index = index
            part = self._chunk[offset : offset + end - first]
            tokens += part
            first += len(part)
        return tuple(tokens)


def natural_length(digest: bytes, mean_output_tokens: int) -> int:
    """Where the prompt's output ends by itself: uniform over mean/2 … 3·mean/2, at least 1."""
    half = mean_output_tokens // 2
    draw = int.from_bytes(blake2b(b"length", digest_size=8, key=digest).digest(), "little")
    return max(1, mean_output_tokens - half + draw % (2 * half + 1))


def plan_output(
    stream: TokenStream,
    *,
    natural: int,
    max_tokens: int,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
) -> tuple[int, Literal["stop", "length"]]:
    """How many tokens the output has, and why it ends, by vLLM's rules.

    No end before `min_tokens`; a stop token is part of the output; a natural end at exactly `max_tokens` is a "stop".
    """
    reason: Literal["stop", "length"] = "length"
    count = max_tokens
    if not ignore_eos and max(natural, min_tokens) <= max_tokens:
        count, reason = max(natural, min_tokens), "stop"
    if stop_token_ids:
        stops = frozenset(stop_token_ids)
        first = max(0, min_tokens - 1)
        while first < count:
            tokens = stream.take(first, min(_PER_DIGEST, count - first))
            for index, token in enumerate(tokens, first):
                if token in stops:
                    return index + 1, "stop"
            first += len(tokens)
    return count, reason


def expected_tokens(
    prompt_token_ids: Sequence[int],
    n: int,
    *,
    token_low: int = DEFAULT_TOKEN_LOW,
    token_high: int = DEFAULT_TOKEN_HIGH,
    seed: int = 0,
) -> list[int]:
    """The first n output tokens of any engine with these options, if it never stopped."""
    digest = prompt_digest(prompt_token_ids, seed=seed)
    return list(TokenStream(digest, token_low=token_low, token_high=token_high).take(0, n))


def expected_output_length(
    prompt_token_ids: Sequence[int], *, mean_output_tokens: int = DEFAULT_MEAN_OUTPUT_TOKENS, seed: int = 0
) -> int:
    """After how many tokens the engine stops by itself (with `ignore_eos` it does not)."""
    return natural_length(prompt_digest(prompt_token_ids, seed=seed), mean_output_tokens)


def expected_output(
    prompt_token_ids: Sequence[int],
    *,
    max_tokens: int,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    token_low: int = DEFAULT_TOKEN_LOW,
    token_high: int = DEFAULT_TOKEN_HIGH,
    mean_output_tokens: int = DEFAULT_MEAN_OUTPUT_TOKENS,
    seed: int = 0,
) -> tuple[list[int], Literal["stop", "length"]]:
    """The whole right answer to a request, with its finish reason: the oracle of tests and benchmarks."""
    digest = prompt_digest(prompt_token_ids, seed=seed)
    stream = TokenStream(digest, token_low=token_low, token_high=token_high)
    count, reason = plan_output(
        stream,
        natural=natural_length(digest, mean_output_tokens),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
    )
    return list(stream.take(0, count)), reason


# --- Content keys of an output's blocks (`kv_hashes`). Pure; the same in every process.


class OutputKeys:
    """Keys of the full blocks after those of the prompt, computed when they are needed (`SimRequest.output_keys`)."""

    __slots__ = ("_block_size", "_parent", "_prompt_tokens", "_tail", "_tokens")

    def __init__(self, prompt: Sequence[int], tokens: TokenStream, keys: Sequence[int], block_size: int) -> None:
        self._tail = tuple(prompt[len(keys) * block_size :])
        self._parent = keys[-1] if keys else None
        self._prompt_tokens = len(prompt)
        self._tokens = tokens
        self._block_size = block_size

    def __call__(self, computed: int) -> Sequence[int]:
        output = self._tokens.take(0, max(0, computed - self._prompt_tokens))
        return block_hashes((*self._tail, *output), self._block_size, parent=self._parent)
