"""How a worker leaves in order: by which sign, what is left, until when, and when it may exit."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.life.roles import ROLES, LeaveBy
from dynamo_local.core.types import Load, Missing, Role

TAKE_BACK_DEADLINE_S = 10.0
"""For a worker that never was ready: it has nothing to finish, and may be deep in loading a model."""

ROUTED_LATE_S = 0.25
"""How long after it deregistered a request may still be on its way to a worker: watchers of etcd see a revoke within
3-4 ms (p99, circus-facts), and the product promises none after 50 ms; the rest is for a busy host."""


def how(role: Role, *, registered: bool = True, etcd_ok: bool = True) -> LeaveBy:
    """By the sign of its role (`roles.ROLES`); by SIGTERM where there is no lease to revoke: not registered (yet), or
    etcd cannot be reached.
    """
    return ROLES[role].leave_by if registered and etcd_ok else LeaveBy.SIGTERM


def leave_deadline_s(drain_deadline_s: float, *, served: bool) -> float:
    """How long it may take. A worker that never was ready gets less; if it turns out to have registered in that
    moment (it may hold requests), the whole deadline again.
    """
    return drain_deadline_s if served else min(drain_deadline_s, TAKE_BACK_DEADLINE_S)


# --- what is left ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Left:
    """What a worker has still to do. `tokens` is of running requests only, an upper bound (they may stop earlier)."""

    running: int
    waiting: int
    tokens: int
    eta_s: float | Missing
    at_most_s: float | Missing

    def __str__(self) -> str:
        if not self.running and not self.waiting:
            return "nothing left"
        what = f"{self.running} in flight" + (f", {self.waiting} waiting" if self.waiting else "")
        if isinstance(self.eta_s, Missing):
            return f"{what}, no estimate ({self.eta_s.reason})"
        # What waits is not in the estimate.
        return f"{what}, {'at least' if self.waiting else 'about'} {self.eta_s:.1f} s"


def left(load: Load | Missing) -> Left | Missing:
    """What is left on a worker, for `dynamo status`."""
    if isinstance(load, Missing):
        return load
    most_s = _seconds(load, load.remaining_tokens)
    return Left(load.request_active_slots, load.num_requests_waiting, load.remaining_tokens, eta_s(load), most_s)


def eta_s(load: Load | Missing) -> float | Missing:
    """When it is likely done: remaining tokens × live ITL, the tokens of running requests decoding side by side:
    `remaining_tokens / request_active_slots × itl_ms / 1000`.

    Exact if all running requests end together. The last one may take longer than this mean: at most
    `remaining_tokens × itl_ms / 1000` (`Left.at_most_s`, one request has all of them), and less if they stop before
    their limit. Requests that wait are not in it: their tokens are not published. Missing if the load is, if no
    token was generated yet (no ITL), or if requests wait and none runs.
    """
    if isinstance(load, Missing):
        return load
    if load.num_requests_waiting and not load.request_active_slots:
        return Missing(f"{load.num_requests_waiting} requests wait and none runs")
    return _seconds(load, load.remaining_tokens / max(1, load.request_active_slots))


def _seconds(load: Load, tokens: float) -> float | Missing:
    if not tokens:
        return 0.0
    return Missing("no inter-token latency yet") if load.itl_ms is None else tokens * load.itl_ms / 1000


# --- deadlines ---------------------------------------------------------------------------------


def cut(load: Load | Missing) -> int | Missing:
    """How many requests ending the session now cuts: running and waiting ones. Unknown is not 0."""
    return load if isinstance(load, Missing) else load.request_active_slots + load.num_requests_waiting


def exit_in_s(
    *,
    now_s: float,
    deregistered_s: float,
    last_arrival_s: float | None,
    in_flight: int,
    quiet_s: float = ROUTED_LATE_S,
) -> float | None:
    """When a draining worker may exit: 0.0 now, more: ask again then, None: not before what is in flight has ended.

    It stays for a quiet period after it deregistered and after the last request that came: whoever picked it in that
    moment is still served. A drain deadline below the quiet period wins; that is the caller's.
    """
    if in_flight:
        return None
    since_s = deregistered_s if last_arrival_s is None else max(deregistered_s, last_arrival_s)
    return max(0.0, since_s + quiet_s - now_s)
