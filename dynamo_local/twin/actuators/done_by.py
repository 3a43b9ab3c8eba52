"""By what a worker came to where it was wanted."""

from __future__ import annotations

from dynamo_local.core.life.instructions import Transition
from dynamo_local.core.life.lifecycle import FlipFailed
from dynamo_local.core.types import WorkerState as S

_ENDS = {
    (S.FLIPPING, S.READY): "flips",
    (S.WAKING, S.READY): "wakes",
    (S.STARTING, S.READY): "starts",
    (S.FALLING_ASLEEP, S.SLEEPING): "sleeps",
}


def done_by(transition: Transition) -> str | None:
    """None where the transition is not the end of such a way."""
    return None if isinstance(transition.event, FlipFailed) else _ENDS.get((transition.before, transition.after))
