"""How long a batch runs without a change. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.engines.sim.scheduling.requests import Seq


def quiet_passes(rows: Sequence[Seq], block_size: int, free_blocks: int) -> int:
    """How many passes can be decided now: until the first sequence ends, or the next one needs a preemption."""
    passes = min([seq.request.num_output_tokens - seq.generated for seq in rows])
    if len(rows) * (passes // block_size + 1) <= free_blocks:  # no sequence needs more: spare the counting
        return passes

    def new_blocks(count: int) -> int:
        return sum(max(0, -(-(seq.computed + count) // block_size) - len(seq.blocks)) for seq in rows)

    if new_blocks(passes) <= free_blocks:
        return passes
    low, high = 1, passes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if new_blocks(middle) <= free_blocks else (low, middle)
    return low
