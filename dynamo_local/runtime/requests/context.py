"""What a handler may know about the request it serves."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field

from dynamo_local.clock import AsyncioClock, Clock

_CLOCK = AsyncioClock()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request, as its handler sees it. `deadline_s` is absolute (of `clock.now_s()`), None without a deadline."""

    request_id: str
    deadline_s: float | None = None
    clock: Clock = field(default=_CLOCK, repr=False, compare=False)

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never below 0; None where the caller set no deadline."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - self.clock.now_s())


REQUEST: contextvars.ContextVar[RequestContext | None] = contextvars.ContextVar("dynamo_request", default=None)
"""The request that the running task serves."""


def current_request() -> RequestContext | None:
    """The request that the running task serves; None outside a handler."""
    return REQUEST.get()


def enter_request(context: RequestContext) -> contextvars.Token[RequestContext | None]:
    """Make `context` the running task's request. For code that runs a handler; undo with `leave_request`."""
    return REQUEST.set(context)


def leave_request(token: contextvars.Token[RequestContext | None]) -> None:
    """Undo `enter_request`, which returned `token`."""
    REQUEST.reset(token)
