"""Content keys of KV blocks: each names its block's tokens and all before them. Pure; the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from dynamo_local.engines.sim.tokens import TokenStream, token_bytes


def block_keys(token_ids: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """16 bytes per full block, over its parent's key and its own tokens. `parent` is the key of the block before."""
    packed = token_bytes(token_ids)
    stride = 4 * block_size
    keys: list[bytes] = []
    for start in range(0, len(packed) - stride + 1, stride):
        parent = blake2b(parent + packed[start : start + stride], digest_size=16).digest()
        keys.append(parent)
    return keys


class OutputKeys:
    """Keys of the full blocks behind the prompt's, made only when they are needed (`SimRequest.output_keys`)."""

    __slots__ = ("_block_size", "_parent", "_prompt_tokens", "_tail", "_tokens")

    def __init__(self, prompt: Sequence[int], tokens: TokenStream, keys: Sequence[bytes], block_size: int) -> None:
        self._tail = tuple(prompt[len(keys) * block_size :])
        self._parent = keys[-1] if keys else b""
        self._prompt_tokens = len(prompt)
        self._tokens = tokens
        self._block_size = block_size

    def __call__(self, computed: int) -> Sequence[bytes]:
        output = self._tokens.take(0, max(0, computed - self._prompt_tokens))
        return block_keys((*self._tail, *output), self._block_size, self._parent)
