"""The decode worker's decision in the twin: prefill here, or there. By the functions of the real one."""

from __future__ import annotations

from dynamo_local.core.disagg import QueueView, decide_prefill
from dynamo_local.core.dispatch.asking import Ask
from dynamo_local.core.dispatch.line import PrefillLine
from dynamo_local.core.dispatch.prefilling import DecodeSide
from dynamo_local.core.dispatch.targets import Timing
from dynamo_local.core.types import Role
from dynamo_local.engines.sim.scheduling.requests import SchedulerConfig
from dynamo_local.profiles import PerfModel
from dynamo_local.twin.options import TwinOptions
from dynamo_local.twin.process import Job, Process


class PrefillChoices:
    """Decides for all decode workers of a run, each by what it knows itself; `queue` is what they sample."""

    def __init__(self, options: TwinOptions, perf: PerfModel, config: SchedulerConfig, queue: PrefillLine[Job]) -> None:
        self._options = options
        self._timing = Timing(perf, config.speed)
        self._config = config
        self._queue = queue
        self._computing = 0

    def side(self, role: Role) -> DecodeSide | None:
        """What a new worker of that role decides with; None: by the thresholds, or never."""
        if self._options.disagg_policy != "slo" or role is not Role.DECODE:
            return None
        return DecodeSide(
            self._timing,
            self._options.targets,
            max_kv_tokens=self._config.num_gpu_blocks * self._config.block_size,
            max_pass_tokens=self._config.max_num_batched_tokens,
        )

    def decide(
        self, process: Process, job: Job, prefill_workers: int, computing: int, now_s: float
    ) -> tuple[bool, float | None]:
        """Whether its prefill goes to the queue, and by when it has to begin there (None: no target).

        `computing` prefills are under way.
        """
        depth = process.depth
        if depth.due(now_s):
            depth.asked()
            waiting = len(self._queue)
            depth.sampled(QueueView(waiting, waiting + computing, self._queue.late), now_s)
        length = job.request.input_length
        cached = process.scheduler.matched_tokens(job.keys)
        side = process.side
        if side is None:
            decision = decide_prefill(
                prompt_length=length,
                prefix_hit_rate=cached / length,
                queue_size=depth.pending,
                prefill_workers=prefill_workers,
                settings=self._options.disagg,
                conditional=self._options.conditional,
            )
            remote, start_by_s = decision.remote, None
        else:
            name = str(job.number)
            side.began(name, length, now_s)
            if (itl_s := process.scheduler.itl_s) is not None:
                side.itl_seen(itl_s, now_s)
            ask = Ask(length, cached, now_s - job.request.at_s)
            choice = side.decide(ask, now_s, queue=depth.view, prefill_workers=prefill_workers)
            remote, start_by_s = choice.remote, choice.start_by_s
            side.follow(name, ask, choice, now_s)
        if remote:
            depth.enqueued()
        return remote, start_by_s

    def submitted(self, side: DecodeSide, job: Job, now_s: float, *, pull: bool) -> None:
        """It goes into the decode worker's engine: with its KV to be pulled, or as a prompt that was to be remote."""
        name = str(job.number)
        if pull:
            side.handed_over(name, now_s)
        elif side.is_away(name):
            side.went_local(name, job.request.input_length, now_s)
