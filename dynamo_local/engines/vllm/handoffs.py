"""KV that was computed for another engine and is still here, as far as this side can tell. Pure.

vLLM keeps the blocks under a lease, which the engine that will pull them renews while the request waits there; it
tells nobody when they were pulled. We notice it by the cache: no request runs here and no block is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

REQUEST: Final = "remote_request_id"
"""Among the `kv_transfer_params`: vLLM's name of the request whose KV it is."""


class Handoffs:
    """Hand-offs of one engine, oldest first. `lease_s` is the connector's; times are monotonic seconds.

    The other side waits for less than a lease, and its last renewal lasts a lease: after two leases none is held.
    """

    def __init__(self, lease_s: float) -> None:
        self._kept_s = 2 * lease_s
        self._held: dict[str, float] = {}

    def add(self, params: Mapping[str, Any], now_s: float) -> None:
        """A request has ended, and its KV is kept for another engine, which will get these `kv_transfer_params`."""
        self._held[str(params.get(REQUEST))] = now_s + self._kept_s

    def forget(self, params: Mapping[str, Any]) -> None:
        """Nobody will pull it. (vLLM has no call to free it sooner than its lease does.)"""
        self._held.pop(str(params.get(REQUEST)), None)

    def observe(self, scheduler_stats: Any, num_live: int) -> bool:
        """Take vLLM's `SchedulerStats` of a pass (None: there were none). True if they show that all KV was pulled."""
        if not self._held or num_live or scheduler_stats is None or scheduler_stats.kv_cache_usage > 0.0:
            return False
        self._held.clear()
        return True

    def num_held(self, now_s: float) -> int:
        """How many may still be held."""
        for request_id in [name for name, until_s in self._held.items() if until_s <= now_s]:
            del self._held[request_id]
        return len(self._held)

    def seconds_left(self, now_s: float) -> float:
        """Seconds until the last of them is over at the latest; 0 if none is held."""
        return max(self._held.values()) - now_s if self.num_held(now_s) else 0.0
