"""What prompts share: system prompts that many begin with, and conversations that go on from their own last prompt."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random

from dynamo_local.twin.generator.options import GeneratorOptions
from dynamo_local.twin.trace import HASH_BLOCK_TOKENS

OPEN_MAX = 50_000
"""Conversations that may go on are remembered up to so many: an endless trace needs no endless memory."""
FORGET_S = 600.0
"""A conversation that has not gone on for so long after its pause has ended.

In a chat service 80 % of what is reused is reused within ten minutes (Wang et al., "KVCache Cache in the Wild",
arXiv:2506.02634).
"""
LONGEST_SHARE = 0.25
"""One of the longest quarter of the conversations that fit goes on.

With all of them, two of three prompts of `chat` go on from another to come to its reuse of 40 %; with the longest alone
one of six. In Mooncake's conversation trace 38 % do.
"""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """One that may go on: at which length at the least, with which full blocks, and from when on."""

    length: int
    ids: tuple[int, ...]
    ready_s: float


class Prefixes:
    """Gives each prompt the ids of its blocks, so that about `reuse` of all tokens have been there before.

    While the share is below that, a conversation goes on whose pause is over and whose last prompt and answer the new
    prompt has room for. So lengths stay as they were drawn. The last token of a prompt is computed by every engine,
    and counts as new.
    """

    def __init__(self, options: GeneratorOptions, rng: Random) -> None:
        self._options = options
        self._rng = rng
        self._system_blocks = options.system // HASH_BLOCK_TOKENS
        self._popularity = list(accumulate(1 / number for number in range(1, options.systems + 1)))
        self._seen_of_system = [0] * options.systems
        self._new_ids = count(self._system_blocks * options.systems)
        self._numbers = count()
        self._pausing: list[tuple[float, int, _Conversation]] = []
        self._by_length: list[tuple[int, int]] = []
        self._ready: OrderedDict[int, _Conversation] = OrderedDict()
        self._tokens = 0
        self._reused = 0

    def ids_of(self, at_s: float, input_length: int, output_length: int) -> tuple[int, ...]:
        """One id for each 512 tokens begun. Calls come in the order of time."""
        self._wake(at_s)
        self._tokens += input_length
        before: tuple[int, ...] | None = None
        if self._reused < self._options.reuse * self._tokens:
            before = self._go_on(input_length)
        if before is None:
            before = self._begin(input_length)
        else:
            self._reused += len(before) * HASH_BLOCK_TOKENS
        new = math.ceil(input_length / HASH_BLOCK_TOKENS) - len(before)
        ids = (*before, *(next(self._new_ids) for _ in range(new)))
        if self._options.reuse:
            self._remember(at_s, input_length, output_length, ids)
        return ids

    def _wake(self, at_s: float) -> None:
        while self._pausing and self._pausing[0][0] <= at_s:
            _, number, conversation = heapq.heappop(self._pausing)
            insort(self._by_length, (conversation.length, number))
            self._ready[number] = conversation
        while self._ready and next(iter(self._ready.values())).ready_s < at_s - FORGET_S:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        number, conversation = self._ready.popitem(last=False)
        del self._by_length[bisect_left(self._by_length, (conversation.length, number))]

    def _go_on(self, input_length: int) -> tuple[int, ...] | None:
        """The full blocks of a conversation's last prompt, or None where none has room in the new one."""
        fitting = bisect_right(self._by_length, (input_length, math.inf))
        if fitting == 0:
            return None
        position = int(fitting * (1 - LONGEST_SHARE * self._rng.random()))
        _, number = self._by_length.pop(min(position, fitting - 1))
        return self._ready.pop(number).ids

    def _begin(self, input_length: int) -> tuple[int, ...]:
        """The blocks of a system prompt, as far as the prompt fills them."""
        blocks = min(self._system_blocks, input_length // HASH_BLOCK_TOKENS)
        if blocks == 0:
            return ()
        (which,) = self._rng.choices(range(self._options.systems), cum_weights=self._popularity)
        seen = min(blocks, self._seen_of_system[which], (input_length - 1) // HASH_BLOCK_TOKENS)
        self._reused += seen * HASH_BLOCK_TOKENS
        self._seen_of_system[which] = max(blocks, self._seen_of_system[which])
        first = which * self._system_blocks
        return tuple(range(first, first + blocks))

    def _remember(self, at_s: float, input_length: int, output_length: int, ids: tuple[int, ...]) -> None:
        """The next prompt holds this one, its answer, and something new."""
        if len(self._pausing) + len(self._ready) >= OPEN_MAX:
            if not self._ready:
                return
            self._forget_oldest()
        pause_s = self._options.think * (0.5 + 0.5 * self._rng.expovariate(1.0))
        conversation = _Conversation(
            input_length + output_length + 1, ids[: input_length // HASH_BLOCK_TOKENS], at_s + pause_s
        )
        heapq.heappush(self._pausing, (conversation.ready_s, next(self._numbers), conversation))
