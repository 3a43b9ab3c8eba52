"""Content keys of the blocks of an output: `kv_hashes`, as everywhere. Pure; the same in every process."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.engines.sim.tokens import TokenStream
from dynamo_local.kv_hashes import block_hashes


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
