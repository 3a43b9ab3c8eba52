"""How long a start takes, with the spares that there are."""

from __future__ import annotations

from dynamo_local.twin.options import LONG_AGO_S, TwinOptions


class Spares:
    """Processes of which a worker is made sooner. The next one is started when that worker is ready."""

    def __init__(self, options: TwinOptions) -> None:
        self._lead = options.lead
        self._warm_s = [LONG_AGO_S] * options.spares

    def start_s(self, now_s: float) -> float:
        """Of a start now: from a spare, if one is warm."""
        lead = self._lead
        for n, warm_at_s in enumerate(self._warm_s):
            if warm_at_s <= now_s:
                self._warm_s[n] = now_s + lead.spare_s + lead.cold_s
                return lead.spare_s
        return lead.cold_s
