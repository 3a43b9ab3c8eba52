"""Traffic from the frontends' own /metrics: every pod behind a name is asked, and the counters are added up.

The name of a Service leads to one pod at a time. With several frontends it must be a headless one, whose name has an
address for each of them, or Prometheus must be asked instead: a part of the sum is no sum.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from dynamo_local.clock import Clock
from dynamo_local.commands.base import ChildSilent
from dynamo_local.commands.dynamo_1x.cards import frontend_counters
from dynamo_local.commands.metrics_text import Metrics
from dynamo_local.commands.probing import get_ok
from dynamo_local.core.types import Missing
from dynamo_local.planner.sources.counters import SCRAPE_EVERY_S, Counted, CounterHistory
from dynamo_local.planner.values.traffic import Traffic
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

RESOLVE_S = 3.0


class FrontendScrapes:
    """`TrafficSource`, between `start` and `close`. `replicas` is how many frontends the graph asks for."""

    def __init__(self, url: str, clock: Clock, replicas: Callable[[], int], *, keep_s: float) -> None:
        self.url = url
        self._clock = clock
        self._replicas = replicas
        self._history = CounterHistory()
        self._history.keep_s = keep_s
        self._known: dict[str, float] = {}
        """Since when each address counts, as far as that was seen."""
        self._scraped = False
        self._asking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Count from now on."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Closing twice is no error."""
        task, self._task = self._task, None
        await ended(task)

    async def traffic(self, window_s: float) -> Traffic | Missing:
        """See `TrafficSource`."""
        await self.scrape()
        return self._history.traffic(window_s, self._clock.now_s())

    async def _run(self) -> None:
        next_s = self._clock.now_s()
        while True:
            try:
                await self.scrape()
            except Exception:
                log.exception("counting the requests failed; it is tried again")
            next_s = max(next_s + SCRAPE_EVERY_S, self._clock.now_s())
            await self._clock.sleep_until(next_s)

    async def scrape(self) -> None:
        """Read all counters once."""
        async with self._asking:
            try:
                urls = await _addresses(self.url)
            except OSError as error:
                self._history.failed(f"{urlsplit(self.url).hostname} cannot be resolved: {error}")
                return
            if len(urls) == 1 and self._replicas() > 1:
                self._history.failed(
                    f"there are {self._replicas()} frontends, and {self.url} leads to one of them at a time: give a "
                    "headless Service, or metric_pulling_prometheus_endpoint"
                )
                return
            told = await asyncio.gather(*(self._ask(url) for url in urls), return_exceptions=True)
            found = [one for one in told if isinstance(one, Counted)]
            absent = [url for url, one in zip(urls, told, strict=True) if not isinstance(one, Counted)]
            for one in told:
                if isinstance(one, BaseException) and not isinstance(one, (ChildSilent, ValueError)):
                    raise one
            self._history.add(self._clock.now_s(), found, absent=absent)
            self._scraped = True

    async def _ask(self, url: str) -> Counted:
        counters = frontend_counters(Metrics(await get_ok(url)))
        began_s = self._clock.now_s() - SCRAPE_EVERY_S if self._scraped else -math.inf
        since_s = self._known.setdefault(url, began_s)
        return Counted(frontend=True, prefills=False, name=url, epoch=url, up_since_s=since_s, counters=counters)


async def _addresses(url: str) -> list[str]:
    """The same URL at each address that its name has. Raises `OSError`."""
    parts = urlsplit(url)
    async with asyncio.timeout(RESOLVE_S):
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname or "", parts.port or 80, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    hosts = sorted({str(address[0]) for *_, address in found})
    return [urlunsplit(parts._replace(netloc=f"{host}:{parts.port or 80}")) for host in hosts]
