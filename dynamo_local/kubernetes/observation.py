"""Traffic from the frontends' own /metrics: every pod behind a name is asked, and the counters are added up.

The name of a Service leads to one pod at a time. With several frontends it must be a headless one, whose name has an
address for each of them, or Prometheus must be asked instead: a part of the sum is no sum.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit, urlunsplit

from dynamo_local.clock import Clock, NowClock
from dynamo_local.components.commands.dynamo_1x_events import frontend_counters
from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.components.commands.probe import get_ok
from dynamo_local.components.commands.runner import ChildSilent
from dynamo_local.core.types import Load, Missing
from dynamo_local.kubernetes.passes import HeardPasses
from dynamo_local.planner.collector import Sampled
from dynamo_local.planner.sources import SCRAPE_EVERY_S, Counted, CounterHistory
from dynamo_local.planner.values import EngineSeen, Traffic, WorkerPools
from dynamo_local.system.executors import ended

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


# --- loads
# Loads of single workers, for the policy `load`: from their engines' passes, where those are heard.
#
# A decode worker's KV use is the KV of its scheduled and queued requests, as a share of what its card says it has.
# What
# waits for a prefill waits in the prefill engines themselves: there is no queue beside them.


class LoadsOfPasses:
    """`pulling.LoadSource` and `pulling.QueueSource`. `ready` are the names by which its loads are known."""

    def __init__(self, heard: HeardPasses, pools: Callable[[], WorkerPools], clock: NowClock) -> None:
        self._heard = heard
        self._pools = pools
        self._clock = clock

    def ready(self) -> tuple[str, ...]:
        """Decode workers that serve, also those that were not heard."""
        return tuple(self._of(self._pools().decode.component))

    async def loads(self) -> dict[str, Sampled[Load]]:
        """Of those that were heard of late."""
        decode = self._pools().decode.component
        limits = self._heard.capabilities().get(decode)
        max_kv = None if limits is None else limits.max_kv_tokens
        now_s = self._clock.now_s()
        found = {name: _load(engines, max_kv) for name, engines in self._of(decode).items()}
        return {name: Sampled(load, now_s) for name, load in found.items() if load is not None}

    async def depth(self) -> Sampled[int] | Missing:
        """Requests in the queues of all prefill engines; missing where one of them was not heard."""
        prefill = self._pools().prefill
        if prefill is None:
            return Missing("the graph has no prefill component")
        waiting = 0
        for engines in self._of(prefill.component).values():
            for engine in engines:
                if isinstance(engine.last, Missing):
                    return engine.last
                waiting += engine.last.queued.num_prefill_requests
        return Sampled(waiting, self._clock.now_s())

    def _of(self, component: str) -> dict[str, list[EngineSeen]]:
        """The engines of a component, by worker."""
        found: dict[str, list[EngineSeen]] = {}
        for engine, seen in self._heard.seen().items():
            if seen.component == component:
                found.setdefault(engine.worker_id, []).append(seen)
        return found


def _load(engines: Iterable[EngineSeen], max_kv: int | None) -> Load | None:
    """Of one worker; its ranks share nothing, so the mean of their KV use counts. None where one was not heard."""
    kv = running = waiting = ranks = 0
    for engine in engines:
        if isinstance(engine.last, Missing):
            return None
        now, queued = engine.last.scheduled, engine.last.queued
        kv += now.sum_decode_kv_tokens + queued.sum_decode_kv_tokens
        running += now.num_decode_requests + now.num_prefill_requests
        waiting += queued.num_prefill_requests + queued.num_decode_requests
        ranks += 1
    usage: float | Missing = Missing("its card does not say how much KV it has")
    if max_kv:
        usage = min(1.0, kv / (max_kv * ranks))
    return Load(request_active_slots=running, num_requests_waiting=waiting, gpu_cache_usage_perc=usage)
