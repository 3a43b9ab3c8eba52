"""What a pass computes, and passes that have ended, in the terms of `core.passes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from dynamo_local.core.passes import NONE, Requests, Tally, variance
from dynamo_local.engines.sim.scheduling.requests import Pass, Seq


class PassDone(NamedTuple):
    """A pass that ended at `end_s` after `wall_time_s`."""

    end_s: float
    wall_time_s: float
    scheduled: Requests
    queued: Requests


def scheduled_of(rows: Sequence[Seq]) -> Requests:
    """What the pass that is about to begin computes. A row with only its last token left is a decode row."""
    decodes = context = context_squares = 0
    prefills, computed, read = Tally(), 0, 0
    for seq in rows:
        total = seq.request.num_prompt_tokens + seq.generated
        if seq.computed + 1 == total:  # most rows of most passes
            decodes += 1
            context += total
            context_squares += total * total
        else:
            prefills.add(seq.request.num_prompt_tokens)
            computed += seq.step
            read += seq.computed
    return Requests(
        num_prefill_requests=prefills.count,
        sum_prefill_tokens=computed,
        var_prefill_length=prefills.variance,
        sum_prefill_kv_tokens=read,
        num_decode_requests=decodes,
        sum_decode_kv_tokens=context,
        var_decode_kv_tokens=variance(decodes, context, context_squares),
    )


def passes_done(run: Pass, count: int, queued: Requests) -> Iterator[PassDone]:
    """The first `count` passes of the run. In a quiet run each sequence grows by one token per pass, so its variance
    stays as it is."""
    begun_s, scheduled = run.start_s, run.scheduled or NONE
    for end_s in run.ends[:count]:
        yield PassDone(end_s, end_s - begun_s, scheduled, queued)
        begun_s, scheduled = end_s, one_later(scheduled)


def one_later(scheduled: Requests, passes: int = 1) -> Requests:
    """What a quiet run computes so many passes later."""
    more = scheduled.num_decode_requests * passes
    return replace(scheduled, sum_decode_kv_tokens=scheduled.sum_decode_kv_tokens + more)
