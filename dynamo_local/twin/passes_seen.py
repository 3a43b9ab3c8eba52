"""The forward passes of the twin's engines, as a planner is shown them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Role
from dynamo_local.engines.sim.scheduling.watched import PassDone
from dynamo_local.planner.values.passes import Capabilities, EngineSeen
from dynamo_local.twin.options import DECODE, PREFILL
from dynamo_local.twin.process import Process

SAMPLES_MAX = 64
"""Passes of one engine in one pull, evenly spread, the newest among them: as many as a real worker answers with."""
HEARTBEAT_S = 1.0
"""An engine that ran no pass for so long says so, with its queue."""


@dataclass(slots=True)
class PassesSeen:
    """`watches` are where the schedulers put the passes that have ended, by instance id."""

    watches: dict[int, list[PassDone]] = field(default_factory=dict)
    _last: dict[int, ForwardPass] = field(default_factory=dict)

    def watch(self, instance_id: int) -> list[PassDone]:
        """For a new process's scheduler."""
        return self.watches.setdefault(instance_id, [])

    def engines(self, serving: Iterable[Process], now_s: float) -> dict[EngineId, EngineSeen]:
        """Those that serve, with their passes since the last call. Their schedules have been brought to `now_s`."""
        return {EngineId(str(process.instance_id)): self._seen(process, now_s) for process in serving}

    def _seen(self, process: Process, now_s: float) -> EngineSeen:
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


def capabilities(process: Process, context_length: int) -> Capabilities:
    """What its engine can take at most."""
    config = process.scheduler.config
    return Capabilities(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_kv_tokens=config.num_gpu_blocks * config.block_size,
        context_length=context_length,
    )
