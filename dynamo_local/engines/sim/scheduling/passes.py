"""The passes of a run: when they end, and the tokens that each gives its sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from dynamo_local.engines.sim.scheduling.requests import Pass, Seq, Tokens
from dynamo_local.engines.sim.scheduling.sequence_cache import SequenceCache
from dynamo_local.profiles import PerfModel


def cost(rows: Sequence[Seq], perf: PerfModel) -> tuple[float, int, bool]:
    """How long a pass with these rows takes (seconds, at speed 1), the KV tokens of its decode rows, and whether it has
    no other rows."""
    launch_s, prefill_s, batch, kv_tokens = 0.0, 0.0, 0, 0
    for seq in rows:
        total = seq.request.num_prompt_tokens + seq.generated
        if seq.computed + 1 == total:
            # Only the last token is left to compute, so to the GPU it is a decode row.
            batch += 1
            kv_tokens += total
            continue
        prefill_s += perf.prefill_s(seq.computed, seq.step)
        if seq.starts:
            launch_s = perf.launch_s
    decode_s = perf.decode_s(batch, kv_tokens, kv_tokens / batch) if batch else 0.0
    return launch_s + prefill_s + decode_s, kv_tokens, batch == len(rows)


def extend(run: Pass, passes: int, perf: PerfModel, *, speed: float, expiry_s: float) -> None:
    """Compute the ends of `passes` more passes; set the run's limit if a lease ends before (at `expiry_s`)."""
    ends, batch = run.ends, len(run.rows)
    durations = perf.decode_run_s(batch, run.kv_tokens + batch * len(ends), passes)
    if speed != 1.0:
        durations = [decode_s / speed for decode_s in durations]
    later = list(accumulate(durations, initial=ends[-1]))
    begun = bisect_left(later, expiry_s)
    if begun < passes:
        # A pass that begins at or after the lease's end is not part of this run.
        run.limit = len(ends) + begun
    ends += later[1 : begun + 1]


def end_rows(run: Pass, end_s: float) -> list[Tokens]:
    """The end of a pass with prompts in it: each sequence whose tokens are all computed gets one more."""
    times = (end_s,)
    events: list[Tokens] = []
    for seq in run.rows:
        seq.computed += seq.step
        if seq.computed == seq.total:
            events.append(Tokens(seq.request.request_id, seq.generated, times))
            seq.generated += 1
    return events


def advance_rows(run: Pass, count: int, cache: SequenceCache, *, over: bool) -> list[Tokens]:
    """`count` quiet passes: a token each. Blocks are taken in the order in which pass by pass would take them.

    `over`: the run ends with them, so no block is taken for a pass after the last.
    """
    times = tuple(run.ends[:count])
    size = cache.block_size
    formed = count - 1 if over else count
    crossings: list[tuple[int, int]] = []
    events: list[Tokens] = []
    for row, seq in enumerate(run.rows):
        events.append(Tokens(seq.request.request_id, seq.generated, times))
        at = size - seq.computed % size
        while at <= formed:
            crossings.append((at, row))
            at += size
        seq.computed += count
        seq.generated += count
    for _, row in sorted(crossings):
        run.rows[row].blocks += cache.pool.take(1)
    return events
