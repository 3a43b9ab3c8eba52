"""A planner's view of the simulated fleet: forward passes of the engines, and windows of traffic."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing, Role
from dynamo_local.engines.sim.scheduler import PassDone
from dynamo_local.planner.values import Capabilities, Ended, EngineSeen, Requests, Traffic
from dynamo_local.simulator.options import DECODE, PREFILL
from dynamo_local.simulator.process import Job, SimulatedProcess

SAMPLES_MAX = 64
"""Passes of one engine in one pull, evenly spread, the newest among them: as many as a real worker answers with."""
HEARTBEAT_S = 1.0
"""An engine that ran no pass for so long says so, with its queue."""


@dataclass(slots=True)
class ObservedPasses:
    """`watches` are where the schedulers put the passes that have ended, by instance id."""

    watches: dict[int, list[PassDone]] = field(default_factory=dict)
    _last: dict[int, ForwardPass] = field(default_factory=dict)

    def watch(self, instance_id: int) -> list[PassDone]:
        """For a new process's scheduler."""
        return self.watches.setdefault(instance_id, [])

    def engines(self, serving: Iterable[SimulatedProcess], now_s: float) -> dict[EngineId, EngineSeen]:
        """Those that serve, with their passes since the last call. Their schedules have been brought to `now_s`."""
        return {EngineId(str(process.instance_id)): self._seen(process, now_s) for process in serving}

    def _seen(self, process: SimulatedProcess, now_s: float) -> EngineSeen:
        engine, number = EngineId(str(process.instance_id)), process.scheduler.passes
        done = self.watches[process.instance_id]
        step = -(-len(done) // SAMPLES_MAX) or 1
        passes = [
            ForwardPass(engine, number - back, one.wall_time_s, one.scheduled, one.queued, one.end_s)
            for back in range(0, len(done), step)
            for one in (done[-1 - back],)
        ][::-1]
        done.clear()
        if passes:
            self._last[process.instance_id] = passes[-1]
        last = self._last.get(process.instance_id)
        if last is None or now_s - last.at_s >= HEARTBEAT_S:
            last = ForwardPass(engine, number, 0.0, *process.scheduler.passing(), at_s=now_s)
        return EngineSeen(PREFILL if process.role is Role.PREFILL else DECODE, tuple(passes), last)


def capabilities(process: SimulatedProcess, context_length: int) -> Capabilities:
    """The limits of the engine."""
    config = process.scheduler.config
    return Capabilities(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_kv_tokens=config.num_gpu_blocks * config.block_size,
        context_length=context_length,
    )


# --- Windows of traffic

NO_REQUEST = Missing("no request in this window")

Events = list[tuple[float, ...]]
"""Each begins with its time, in seconds."""


class ObservedTraffic:
    """Events in the order of their times. As Frontends count: a request when it begins, its first token and its end
    when they come."""

    def __init__(self) -> None:
        self._began: Events = []
        self._first: Events = []
        self._ended: Events = []
        self._looked_up: Events = []

    def began(self, job: Job, now_s: float) -> None:
        """A client asks."""
        insort(self._began, (now_s, job.request.input_length))

    def first_token(self, job: Job, at_s: float) -> None:
        """Its first token has come."""
        insort(self._first, (at_s, at_s - job.request.at_s))

    def ended(self, job: Job, at_s: float) -> None:
        """It is answered."""
        decoding_s = 0.0 if job.first_s is None else at_s - job.first_s
        insort(
            self._ended,
            (at_s, job.request.output_length, decoding_s, at_s - job.request.at_s, job.request.input_length),
        )

    def looked_up(self, at_s: float, cached: int, tokens: int) -> None:
        """An engine has begun a prompt of so many tokens, of which so many were cached."""
        insort(self._looked_up, (at_s, cached, tokens))

    def window(self, now_s: float, length_s: float) -> Traffic:
        """The window of so many seconds that ends now; of one that began before the run, what there was of it."""
        length_s = min(length_s, now_s) or length_s

        began, first, ended, looked_up = (
            events[bisect_left(events, (now_s - length_s,)) : bisect_left(events, (now_s,))]
            for events in (self._began, self._first, self._ended, self._looked_up)
        )
        gaps = sum(each[1] - 1 for each in ended)
        tokens = sum(each[2] for each in looked_up)
        return Traffic(
            at_s=now_s,
            duration_s=length_s,
            num_req=len(began),
            isl=_mean([each[1] for each in began]),
            osl=_mean([each[1] for each in ended]),
            ttft_ms=_mean([each[1] * 1000 for each in first]),
            itl_ms=math.fsum(each[2] for each in ended) * 1000 / gaps if gaps else NO_REQUEST,
            request_duration_s=_mean([each[3] for each in ended]),
            kv_hit_rate=sum(each[1] for each in looked_up) / tokens if tokens else NO_REQUEST,
            accept_length=1.0,
        )

    def requests(self, now_s: float, length_s: float) -> Requests:
        """Those of the same window, one by one."""
        since_s = max(0.0, now_s - length_s)
        began, ended = (
            events[bisect_left(events, (since_s,)) : bisect_left(events, (now_s,))]
            for events in (self._began, self._ended)
        )
        return Requests(since_s, now_s, tuple(each[0] for each in began), tuple(_ended(*each) for each in ended))


def _ended(at_s: float, osl: float, decoding_s: float, lasted_s: float, isl: float) -> Ended:
    itl_s = decoding_s / (osl - 1) if osl > 1 else None
    return Ended(at_s, int(isl), int(osl), lasted_s - decoding_s, itl_s)


def _mean(values: list[float]) -> float | Missing:
    return math.fsum(values) / len(values) if values else NO_REQUEST
