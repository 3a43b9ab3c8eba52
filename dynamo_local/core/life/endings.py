"""How the end of a worker's process is judged, from what the worker was when it ended."""

from __future__ import annotations

from dynamo_local.core.exit_codes import how_it_ended
from dynamo_local.core.life.fleet import Course, Worker
from dynamo_local.core.types import WorkerState as S

UNHEARD = "it had answered nothing when its lease ended"
STARTED_AGAIN = "; it is started again"
"""Said of a worker that leaves because somebody else revoked its lease, where the fleet brings such workers back."""


def was_leaving(worker: Worker, code: int | None) -> bool:
    """It ended because it was to. Not one whose lease went while nobody heard of it, and that did not end in order:
    it was stopped for longer than its lease lives, and died of something else."""
    if worker.state is S.DRAINING:
        return not worker.lapsed or code in (0, None)
    return worker.state is S.DRAIN_TIMED_OUT


def comes_back_unasked(worker: Worker) -> bool:
    """Somebody else revoked its lease, and nobody here has ordered its restart: that follows the restart policy."""
    return worker.course is Course.RESTARTING and worker.lease_gone and worker.asked_s is None


def why_it_ended(worker: Worker, code: int | None) -> str | None:
    """In words, for a worker as it was before its process ended."""
    left = was_leaving(worker, code)
    if not left and worker.state is S.DRAINING:
        return f"{how_it_ended(code)}; {UNHEARD}"
    if not left and worker.state in (S.STARTING, S.READY, S.FLIPPING):
        return how_it_ended(code)
    if left and code not in (0, None) and worker.state is S.DRAINING:
        return f"{worker.reason or 'was leaving'}; {how_it_ended(code)}"
    return worker.reason
