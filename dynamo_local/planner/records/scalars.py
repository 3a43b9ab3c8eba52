"""What TensorBoard shows of a planner, as values: Dynamo's scalar names (planner-rules, last paragraph).

A value that is missing gives no point: a curve shows a gap instead of a wrong 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.decisions import Reason, Rule
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.planner.values.readings import Reading

PREFILL_QUEUE_SIZE = "prefill_queue_size"
AVERAGE_KV_LOAD = "average_kv_load"
NUM_QUEUED_REQUEST = "num_queued_request"
NUM_PREFILL_WORKERS = "num_prefill_workers"
NUM_DECODE_WORKERS = "num_decode_workers"
NUM_GPU = "num_gpu"
PREFILL_SCALING_ACTION = "prefill_scaling_action"
DECODE_SCALING_ACTION = "decode_scaling_action"


def of_reading(reading: Reading, pools: WorkerPools) -> dict[str, float]:
    """Scalars of one pull: queue (requests), mean KV load (0..1), requests that wait in decode workers, the workers
    that serve, and the GPUs that both components hold, leaving workers included.

    The mean is over the workers that answered; the sum needs all of them.
    """
    points: dict[str, float] = {
        NUM_PREFILL_WORKERS: 0 if pools.prefill is None else pools.prefill.ready,
        NUM_DECODE_WORKERS: pools.decode.ready,
        NUM_GPU: sum(pool.gpus_held for pool in pools.all),
    }
    if reading.queue is not None and not isinstance(reading.queue, Missing) and math.isfinite(reading.queue):
        points[PREFILL_QUEUE_SIZE] = reading.queue
    if reading.kv.count:
        points[AVERAGE_KV_LOAD] = float(reading.kv.usage / reading.kv.count)
        if reading.kv.count == len(reading.loads):
            points[NUM_QUEUED_REQUEST] = reading.kv.waiting
    return points


def of_decision(reasons: Iterable[Reason], pools: WorkerPools) -> dict[str, float]:
    """The steps that were decided, whether or not anything acts on them.

    An up that waits for a GPU is counted once, in the decision that planned it, not again when it is carried out.
    """
    names: Mapping[str, str] = {
        pools.decode.component: DECODE_SCALING_ACTION,
        **({pools.prefill.component: PREFILL_SCALING_ACTION} if pools.prefill is not None else {}),
    }
    return {names[reason.component]: reason.step for reason in reasons if reason.rule != Rule.GPU_FREED}
