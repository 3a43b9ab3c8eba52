"""Inputs and outputs of the scheduler, as values."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo_local.core.passes import Requests
from dynamo_local.engines.sim.options import Faults

# --- KV that another engine will pull, each under a lease. Pure.


@dataclass(slots=True)
class Handoff:
    """The blocks of one prompt. While pinned (a pull is under way) it does not expire."""

    request_id: str
    blocks: list[int]
    num_tokens: int
    expires_at_s: float
    pinned: bool = False


class HandoffTable:
    """Entries that leave the table are returned: the caller frees their blocks."""

    __slots__ = ("_held", "expiry_s")

    def __init__(self) -> None:
        self._held: dict[str, Handoff] = {}
        self.expiry_s = math.inf
        """When the next lease ends."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def hold(self, handoff: Handoff) -> None:
        """Keep the KV until it is pulled, released or expired."""
        self._held[handoff.request_id] = handoff
        self.expiry_s = min(self.expiry_s, handoff.expires_at_s)

    def pin(self, request_id: str) -> Handoff:
        """No expiry until `unpin` or `pop`. KeyError if it is not held."""
        handoff = self._held[request_id]
        handoff.pinned = True
        self._find_expiry()
        return handoff

    def unpin(self, request_id: str) -> None:
        """The lease counts again; an unknown one is no error."""
        if request_id in self._held:
            self._held[request_id].pinned = False
            self._find_expiry()

    def pop(self, request_id: str) -> Handoff | None:
        """Take it out; None if it is not held."""
        handoff = self._held.pop(request_id, None)
        self._find_expiry()
        return handoff

    def pop_expired(self, now_s: float) -> list[Handoff]:
        """Take out those whose lease is over at `now_s`, in the order in which they were held."""
        if self.expiry_s > now_s:
            return []
        expired = [h for h in self._held.values() if not h.pinned and h.expires_at_s <= now_s]
        for handoff in expired:
            del self._held[handoff.request_id]
        self._find_expiry()
        return expired

    def _find_expiry(self) -> None:
        self.expiry_s = min((h.expires_at_s for h in self._held.values() if not h.pinned), default=math.inf)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The shape of one engine. `coalesce=False` runs every pass by itself: slower, for tests to compare with."""

    num_gpu_blocks: int
    block_size: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    speed: float = 1.0
    kv_lease_duration_s: float = 30.0
    coalesce: bool = True
    faults: Faults | None = None
    accept_length: float = 1.0
    """Mean number of tokens that a decode pass gives a sequence: its own, and accepted draft tokens."""

    @property
    def draft_tokens(self) -> int:
        """Tokens that are drafted for a sequence in a decode pass; 0 without speculation."""
        return math.ceil(self.accept_length) - 1

    def speed_at(self, at_s: float) -> float:
        """Factor by which a pass that begins at that moment is faster."""
        return self.speed if self.faults is None else self.speed / self.faults.factor(at_s)

    def check(self, request: SimRequest) -> None:
        """Raises ValueError for a request that can never run here."""
        if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
            raise ValueError(f"request {request.request_id}: a prompt and an output have 1 token or more")
        capacity = self.num_gpu_blocks * self.block_size
        # The last output token's KV is never computed.
        if request.num_prompt_tokens + request.num_output_tokens - 1 > capacity:
            raise ValueError(f"request {request.request_id} does not fit the KV cache of {capacity} tokens")


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request as the scheduler sees it: sizes and content keys, no tokens.

    `num_output_tokens` (1 or more): tokens that it will generate. `max_output_tokens`: its limit.
    `block_keys`: keys of the prompt's full blocks. A key names the block *and all before it*. With fewer keys than
    blocks, the rest is not reusable. `output_keys(n)`: keys of the full blocks after the prompt's, once n tokens of
    prompt and output are computed. None: no reuse. It needs all `block_keys`.
    `hold_kv`: keep the blocks under a lease at the end, for another engine.
    `pull_kv`: pull the prompt's KV from another engine.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: Literal["stop", "length"] = "length"
    max_output_tokens: int = 0
    block_keys: Sequence[Hashable] = ()
    output_keys: Callable[[int], Sequence[Hashable]] | None = None
    hold_kv: bool = False
    pull_kv: bool = False


class Tokens(NamedTuple):
    """Output tokens `first` … `first + len(times_s) - 1`, each with the moment at which its pass ended."""

    request_id: str
    first: int
    times_s: Sequence[float]


class Started(NamedTuple):
    """Admitted for the first time; `num_cached_tokens` of its prompt were in the cache."""

    request_id: str
    at_s: float
    num_cached_tokens: int


class PullReady(NamedTuple):
    """The request's blocks are allocated: pull `num_tokens` now, then call `pulled` (or `abort`)."""

    request_id: str
    at_s: float
    num_tokens: int


class Preempted(NamedTuple):
    """The cache was full: its blocks are gone, and it will be computed again (what was sent stays sent)."""

    request_id: str
    at_s: float


class Finished(NamedTuple):
    """The last event of a request. `handoff` is set where its KV is held for another engine."""

    request_id: str
    at_s: float
    reason: Literal["stop", "length"]
    handoff: Handoff | None


class HandoffExpired(NamedTuple):
    """Nobody pulled in time; the blocks are free."""

    request_id: str
    at_s: float


Event = Tokens | Started | PullReady | Preempted | Finished | HandoffExpired


@dataclass(slots=True, eq=False)
class Seq:
    """The scheduler's own record of one request."""

    request: SimRequest
    keys: Sequence[Hashable]
    pull: bool
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    generated: int = 0
    stored: int = 0
    """Leading blocks whose content the pool knows."""
    step: int = 0
    """Tokens that the current pass computes."""
    drafts: int = 0
    """Draft tokens that the current pass verifies."""
    accepts: float = 0.0
    """Draft tokens that are still to be accepted, to keep the mean."""
    starts: bool = False
    """The current pass is the first one since it was admitted."""
    announced: bool = False

    @property
    def total(self) -> int:
        """Tokens so far, those of the prompt included."""
        return self.request.num_prompt_tokens + self.generated


@dataclass(slots=True)
class Pass:
    """The current pass, or if it is `quiet` a run of up to `limit` passes.

    `ends[i]` is the end of the i-th of them, computed as far as needed; `kv_tokens` are those of the first, and
    `scheduled` is what it computes (None where nobody watches).
    """

    start_s: float
    rows: list[Seq]
    ends: list[float]
    quiet: bool
    limit: int
    kv_tokens: int
    scheduled: Requests | None = None
