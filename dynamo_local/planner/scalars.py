"""What TensorBoard shows of a planner, as values: Dynamo's scalar names (planner-rules, last paragraph).

A value that is missing gives no point: a gap in a curve is the truth, a 0 in it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.values import Fleet, Reading, Reason, Rule

PREFILL_QUEUE_SIZE = "prefill_queue_size"
AVERAGE_KV_LOAD = "average_kv_load"
NUM_QUEUED_REQUEST = "num_queued_request"
NUM_PREFILL_WORKERS = "num_prefill_workers"
NUM_DECODE_WORKERS = "num_decode_workers"
NUM_GPU = "num_gpu"
PREFILL_SCALING_ACTION = "prefill_scaling_action"
DECODE_SCALING_ACTION = "decode_scaling_action"


def of_reading(reading: Reading, fleet: Fleet) -> dict[str, float]:
    """Scalars of one pull: queue (requests), mean KV load (0..1), requests that wait in decode workers, the workers
    that serve, and the GPUs that both components hold, leaving workers included.

    The mean is over the workers that answered; the sum needs all of them.
    """
    points: dict[str, float] = {
        NUM_PREFILL_WORKERS: 0 if fleet.prefill is None else fleet.prefill.ready,
        NUM_DECODE_WORKERS: fleet.decode.ready,
        NUM_GPU: sum(pool.gpus_held for pool in fleet.pools),
    }
    if reading.queue is not None and not isinstance(reading.queue, Missing) and math.isfinite(reading.queue):
        points[PREFILL_QUEUE_SIZE] = reading.queue
    known = [load for load in reading.loads.values() if _is_sample(load)]
    if known:
        points[AVERAGE_KV_LOAD] = sum(load.gpu_cache_usage_perc for load in known) / len(known)
        if len(known) == len(reading.loads):
            points[NUM_QUEUED_REQUEST] = sum(load.num_requests_waiting for load in known)
    return points


def of_decision(reasons: Iterable[Reason], fleet: Fleet) -> dict[str, float]:
    """The steps that were decided, whether or not anything acts on them: -1, 0 or +1.

    An up that waits for a GPU is one step, in the decision that planned it; that it is carried out later is no other.
    """
    names: Mapping[str, str] = {
        fleet.decode.component: DECODE_SCALING_ACTION,
        **({fleet.prefill.component: PREFILL_SCALING_ACTION} if fleet.prefill is not None else {}),
    }
    return {names[reason.component]: reason.step for reason in reasons if reason.rule is not Rule.GPU_FREED}


def _is_sample(load: Load | Missing) -> TypeGuard[Load]:
    return isinstance(load, Load) and math.isfinite(load.gpu_cache_usage_perc)
