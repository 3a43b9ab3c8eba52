"""The question about one prompt, the choice, and a decode worker's record of a request on its way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from dynamo_local.core.routing.estimates import Why

Way = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt. `waited_s` is since the request came."""

    prompt_tokens: int
    cached_tokens: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice, and its reason: estimates in seconds from now to the first token, costs in expected misses.

    `start_by_s` is when (same clock as `decide`'s) a prefill worker has to begin for the target to be kept; None: there
    is no target. `remote_s` and `local_s` are None where that way is closed. `estimated_s` is the uncorrected estimate
    of the chosen way, for a remote one to the end of its prefill. `behind_s`: how long its KV then waits for prompts
    that are computed here.
    """

    remote: bool
    reason: str
    local_s: float | None = None
    remote_s: float | None = None
    harmed: float = 0.0
    work_s: float = 0.0
    start_by_s: float | None = None
    fallback: bool = False
    estimated_s: float | None = None
    behind_s: float = 0.0
    why: Why = Why.SOONER

    @property
    def first_token_s(self) -> float | None:
        """The estimate of the chosen way, from now on."""
        return self.remote_s if self.remote else self.local_s


class Promise(NamedTuple):
    """The first token is to come `estimated_s` after `at_s`, and has to within `left_s` (None: there is no target)."""

    way: Way
    estimated_s: float
    at_s: float
    left_s: float | None


@dataclass(slots=True)
class Request:
    """As `core.routing.prefill_choice.DecodeSide` knows it. Times are seconds of the clock that it is told."""

    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    generated: int = 0
    local_tokens: int | None = None
    """Uncached tokens of a prompt that is to be computed here."""
    away_work_s: float | None = None
    """The work of its prefill elsewhere, while it is awaited."""
    estimated_s: float | None = None
    asked_s: float = 0.0
    handed_s: float | None = None
    behind_s: float = 0.0
    """For how long its KV was expected to wait, once there, for the prompts that are computed here."""
    promised: Promise | None = None
    """The estimate when it went the way that was chosen."""

    @property
    def cached_tokens(self) -> int:
        """The tokens of a prompt that is to be computed here."""
        return self.prompt_tokens - (self.local_tokens or 0)


# --- line
# In which order prefills are pulled: what can keep its target before what cannot, which never starves.
#
# Entries that can keep it are pulled in the order in which they came: their targets are alike, so that is the order of
# their deadlines. One whose latest start has passed when its turn comes, while others wait, goes to a second line,
# behind all of the first. That line has every `LATE_EVERY`-th turn, and every turn that the first leaves.

LATE_EVERY = 8
"""One turn in this many in a row is for late entries."""

E = TypeVar("E")


def is_late(start_by_s: float | None, now_s: float) -> bool:
    """Whether an entry that has to be begun by then (None: no target) cannot keep its target any more."""
    return start_by_s is not None and start_by_s < now_s


class Turns:
    """Whose turn it is, for one who pulls."""

    def __init__(self) -> None:
        self._since_late = 0

    @property
    def late_first(self) -> bool:
        """Whether what is late has the next turn, if there is any."""
        return self._since_late >= LATE_EVERY - 1

    def pulled(self, *, late: bool) -> None:
        """An entry was taken from that line."""
        self._since_late = 0 if late else self._since_late + 1

    def none_late(self) -> None:
        """It was the turn of what is late, and nothing is: the other line has as many turns again."""
        self._since_late = 0


class PrefillLine(Generic[E]):
    """Both lines in one place, as the prefill queue keeps them on its server."""

    def __init__(self) -> None:
        self._first: deque[tuple[E, float | None]] = deque()
        self._late: deque[E] = deque()

    def __len__(self) -> int:
        return len(self._first) + len(self._late)

    def __bool__(self) -> bool:
        return bool(self._first or self._late)

    @property
    def late(self) -> int:
        """Entries in the second line."""
        return len(self._late)

    def append(self, entry: E, start_by_s: float | None) -> None:
        """One more; `start_by_s` None: it has no target."""
        self._first.append((entry, start_by_s))

    def remove(self, entry: E) -> None:
        """It is not wanted any more. ValueError if it is not here."""
        for place, (each, _) in enumerate(self._first):
            if each is entry:
                del self._first[place]
                return
        self._late.remove(entry)

    def popleft(self, turns: Turns, now_s: float) -> E:
        """The next one. IndexError if there is none."""
        if self._late and turns.late_first:
            turns.pulled(late=True)
            return self._late.popleft()
        while self._first:
            entry, start_by_s = self._first.popleft()
            if not (self._first and is_late(start_by_s, now_s)):
                turns.pulled(late=False)
                return entry
            self._late.append(entry)
        turns.pulled(late=True)
        return self._late.popleft()
