"""What a request's sampling parameters make of the simulated output: another seed, a script to answer, logprobs.

Numbers, like tokens, are functions of the prompt, the seed and the position: the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.tokens import TokenStream, natural_length
from dynamo_local.ports import SamplingParams, TokenLogprobs


def seeded(digest: bytes, sampling: SamplingParams) -> bytes:
    """The key of the output. A seed gives another one, except where nothing is left to chance (temperature 0)."""
    if sampling.seed is None or sampling.temperature == 0:
        return digest
    return blake2b((sampling.seed % 2**64).to_bytes(8, "little"), digest_size=16, key=digest).digest()


def answer_of(digest: bytes, sampling: SamplingParams, options: SimOptions) -> tuple[TokenStream, int]:
    """The tokens of the answer, and after how many of them it ends by itself."""
    key = seeded(digest, sampling)
    script = () if sampling.extras is None else sampling.extras.script
    stream: TokenStream
    if script:
        stream = ScriptedStream(key, script, token_low=options.token_low, token_high=options.token_high)
    else:
        stream = TokenStream(key, token_low=options.token_low, token_high=options.token_high)
    stream.prompt_digest = digest
    return stream, len(script) or natural_length(key, options.mean_output_tokens)


class ScriptedStream(TokenStream):
    """The script's tokens first."""

    __slots__ = ("_script",)

    def __init__(self, digest: bytes, script: tuple[int, ...], *, token_low: int, token_high: int) -> None:
        super().__init__(digest, token_low=token_low, token_high=token_high)
        self._script = script

    def take(self, first: int, count: int) -> tuple[int, ...]:
        head = self._script[first : first + count]
        return head + super().take(first + len(head), count - len(head))


def logprobs_of(tokens: TokenStream, token_ids: Sequence[int], first: int, alternatives: int) -> list[TokenLogprobs]:
    """For each token itself and the likeliest others, most likely first: the token has 0.5 to 0.98, and the others half
    of what the one before left. Positions below 0 are the prompt's."""
    return [_at(tokens, token, first + n, alternatives) for n, token in enumerate(token_ids)]


def _at(tokens: TokenStream, token: int, position: int, alternatives: int) -> TokenLogprobs:
    key = tokens.digest if position >= 0 else tokens.prompt_digest
    draw = blake2b(b"logprobs %d" % position, digest_size=8, key=key).digest()
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
