"""The step machine of the simulated engine: what vLLM V1's scheduler does, on modelled time. Pure and deterministic.

Time is an argument. A pass computes up to `max_num_batched_tokens`: one token for each decoding sequence, in the order
of their admission, and chunks of prompts with what is left. Requests are admitted first in, first out. When the cache
is full the sequence admitted last loses its blocks and is computed again. Rules: vllm/v1/core/sched/scheduler.py.

Passes in which nobody joins, leaves or is preempted form a *quiet run* that is advanced as one step. The times, tokens
and blocks are those of pass by pass, bit for bit (tests/property/test_sim_scheduler.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from dynamo_local.core.passes import NONE, Requests, Tally, variance
from dynamo_local.core.routing.kv_events import KvEvent
from dynamo_local.engines.sim.blocks import BlockPool, SequenceCache
from dynamo_local.engines.sim.requests import (
    Event,
    Finished,
    Handoff,
    HandoffExpired,
    HandoffTable,
    Pass,
    Preempted,
    PullReady,
    SchedulerConfig,
    Seq,
    SimRequest,
    Started,
    Tokens,
)
from dynamo_local.profile.interpolation import PerfModel

# --- Requests that do not run: preempted ones, then in order of arrival. Those with KV from another engine are apart.


class Queue:
    """All of them, with their sums (`seen`) kept as they come and go: a look costs the same for any length."""

    def __init__(self) -> None:
        self.waiting: deque[Seq] = deque()
        self.pulled: deque[Seq] = deque()
        """Their KV has come."""
        self._pulling: dict[str, Seq] = {}
        self._prefill = Tally()
        self._decode = Tally()
        self._counted: dict[Seq, tuple[Tally, int]] = {}

    def __len__(self) -> int:
        return len(self._counted)

    def append(self, seq: Seq) -> None:
        """A new request."""
        self._count(seq)
        self.waiting.append(seq)

    def put_back(self, seq: Seq) -> None:
        """It was preempted."""
        self._count(seq)
        self.waiting.appendleft(seq)

    def begin_pull(self) -> Seq:
        """The first one that waits: its KV is being pulled from now on."""
        seq = self.waiting.popleft()
        self._pulling[seq.request.request_id] = seq
        return seq

    def end_pull(self, request_id: str) -> Seq:
        """Its KV has come. KeyError if it is not being pulled."""
        seq = self._pulling.pop(request_id)
        seq.pull = False
        self.pulled.append(seq)
        return seq

    def admit(self, line: deque[Seq]) -> Seq:
        """The first one of `waiting` or of `pulled`: it runs from now on."""
        seq = line.popleft()
        self._uncount(seq)
        return seq

    def discard(self, seq: Seq) -> None:
        """It was aborted; one that runs is no error."""
        if seq not in self._counted:
            return
        self._uncount(seq)
        if self._pulling.pop(seq.request.request_id, None) is None:
            (self.waiting if seq in self.waiting else self.pulled).remove(seq)

    def seen(self) -> Requests:
        """The queued requests, in the form of `ForwardPass.queued`."""
        prefill, decode = self._prefill, self._decode
        return Requests(
            num_prefill_requests=prefill.count,
            sum_prefill_tokens=prefill.total,
            var_prefill_length=prefill.variance,
            num_decode_requests=decode.count,
            sum_decode_kv_tokens=decode.total,
            var_decode_kv_tokens=decode.variance,
        )

    def _count(self, seq: Seq) -> None:
        remote = seq.pull or seq.generated > 0
        tally, tokens = (self._decode, seq.total) if remote else (self._prefill, seq.request.num_prompt_tokens)
        tally.add(tokens)
        self._counted[seq] = (tally, tokens)

    def _uncount(self, seq: Seq) -> None:
        tally, tokens = self._counted.pop(seq)
        tally.remove(tokens)


# --- The passes of a run: when they end, and the tokens that each gives its sequences.


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


def end_rows(run: Pass, end_s: float, accept_length: float) -> list[Tokens]:
    """The end of one pass: each sequence whose tokens are all computed gets one more, and its accepted draft tokens.

    How many drafts are accepted follows from `accept_length` alone: as many as keep each sequence near the mean.
    """
    events: list[Tokens] = []
    for seq in run.rows:
        seq.computed += seq.step
        if seq.computed == seq.total:
            accepted = 0
            if seq.drafts:
                seq.accepts += accept_length - 1
                accepted = min(int(seq.accepts), seq.drafts)
                seq.accepts -= int(seq.accepts)
                seq.computed += accepted
            events.append(Tokens(seq.request.request_id, seq.generated, (end_s,) * (1 + accepted)))
            seq.generated += 1 + accepted
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


# --- How long a batch runs without a change. Pure.


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


# --- Passes in the terms of `core.passes`


class PassDone(NamedTuple):
    """A pass that ended at `end_s` after `wall_time_s`."""

    end_s: float
    wall_time_s: float
    scheduled: Requests
    queued: Requests


def scheduled_of(rows: Sequence[Seq]) -> Requests:
    """The content of the pass that begins next. A row with only its last token left is a decode row."""
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
    """The content of a quiet run's pass, that many passes later."""
    more = scheduled.num_decode_requests * passes
    return replace(scheduled, sum_decode_kv_tokens=scheduled.sum_decode_kv_tokens + more)


_LOOK_AHEAD_PASSES = 64
"""How many passes `next_event_at(quiet=True)` looks ahead; an arrival in between makes that work useless."""


class SimScheduler:
    """One engine's scheduler and KV cache.

    Call `advance(now_s)` whenever `next_event_at()` is reached. The other calls take the time too, and first bring the
    schedule to it; the events of that are returned by the next `advance`. Calls at the instant at which a pass begins
    still join it, until `next_event_at` or a later time is asked for. `journal` gets the KV cache's events, where the
    requests' keys are block hashes; `watch` gets the passes that have ended.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        perf: PerfModel,
        journal: list[KvEvent] | None = None,
        watch: list[PassDone] | None = None,
    ) -> None:
        self.config = config
        self._perf = perf
        self._cache = SequenceCache(config.num_gpu_blocks, config.block_size, journal)
        self._seqs: dict[str, Seq] = {}
        self._queue = Queue()
        self._watch = watch
        self._running: list[Seq] = []
        self._held = HandoffTable()
        self._pass: Pass | None = None
        self._start_at_s: float | None = None
        self._now_s = -math.inf
        self._events: list[Event] = []
        self._itl_s: float | None = None
        self.preemptions = 0
        self.passes = 0
        self.drafts = self.accepted = 0
        """Speculation: how often a sequence's tokens were drafted, and the draft tokens that were accepted."""

    # --- what can be seen (as of the last call that took a time) -------------------------------

    @property
    def pool(self) -> BlockPool:
        """The KV blocks; for reading."""
        return self._cache.pool

    @property
    def num_running(self) -> int:
        """Requests that have a place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Not yet running: queued, preempted, or with their KV on its way (as vLLM counts)."""
        return len(self._queue)

    def passing(self) -> tuple[Requests, Requests]:
        """The content of the current pass (empty between passes), and the queue."""
        current = self._pass
        return NONE if current is None else current.scheduled or scheduled_of(current.rows), self._queue.seen()

    @property
    def num_held(self) -> int:
        """Hand-offs neither pulled nor expired."""
        return len(self._held)

    @property
    def pass_tokens(self) -> int:
        """Tokens that the current pass computes; 0 between passes."""
        return sum(seq.step for seq in self._pass.rows) if self._pass else 0

    @property
    def itl_s(self) -> float | None:
        """The duration of the last pass that decoded; None before the first."""
        return self._itl_s

    @property
    def remaining_tokens(self) -> int:
        """Tokens that running requests may still generate: an upper bound, from their `max_output_tokens`."""
        left = [seq.request.max_output_tokens - seq.generated for seq in self._running]
        return sum(left) if not left or min(left) >= 0 else sum(max(count, 0) for count in left)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the cache, over the last thousand requests admitted; 0.0 before the first."""
        return self._cache.hit_rate

    def matched_tokens(self, block_keys: Sequence[Hashable]) -> int:
        """How many tokens of a prompt with these full blocks are cached now."""
        return len(self._cache.pool.match(block_keys, len(block_keys))) * self.config.block_size

    # --- what can be done ----------------------------------------------------------------------

    def submit(self, request: SimRequest, now_s: float) -> None:
        """Queue a request. Raises ValueError if it can never run or its id is in use."""
        self._roll(now_s)
        self.config.check(request)
        if request.request_id in self._seqs or request.request_id in self._held:
            raise ValueError(f"request id {request.request_id} is in use")
        seq = Seq(request, request.block_keys, request.pull_kv)
        self._seqs[request.request_id] = seq
        self._queue.append(seq)
        self._touch()

    def abort(self, request_id: str, now_s: float) -> None:
        """End a request without another event for it; an unknown one is no error. The pass under way still ends."""
        self._roll(now_s)
        seq = self._seqs.pop(request_id, None)
        if seq is None:
            return
        self._queue.discard(seq)
        for rows in (self._running, [] if self._pass is None else self._pass.rows):
            if seq in rows:
                rows.remove(seq)
        self._cache.free(seq)
        self._touch()

    def pulled(self, request_id: str, now_s: float) -> None:
        """The KV that `PullReady` asked for is here. KeyError if the request is not pulling."""
        self._roll(now_s)
        seq = self._queue.end_pull(request_id)
        # The last prompt token is computed here: its logits give this engine's first token (as in vLLM).
        seq.computed = seq.request.num_prompt_tokens - 1
        self._cache.store(seq, seq.request.num_prompt_tokens)
        self._touch()

    def pin(self, request_id: str, now_s: float) -> Handoff:
        """A pull begins: the hand-off does not expire until `release` or `unpin`. KeyError if it is not held."""
        self._roll(now_s)
        handoff = self._held.pin(request_id)
        self._touch()
        return handoff

    def unpin(self, request_id: str, now_s: float) -> None:
        """A pull failed: the lease goes on (or ends now, if it is past)."""
        self._roll(now_s)
        self._held.unpin(request_id)
        self._touch()

    def release(self, request_id: str, now_s: float) -> None:
        """Pulled: free the blocks. An unknown one is no error."""
        self._roll(now_s)
        handoff = self._held.pop(request_id)
        if handoff is not None:
            self._cache.pool.release(handoff.blocks)
            self._touch()

    def reset_prefix_cache(self, now_s: float) -> bool:
        """Forget what is cached; False, and nothing is changed, while any request holds blocks (as vLLM's)."""
        self._roll(now_s)
        return self._cache.pool.clear()

    @property
    def now_s(self) -> float:
        """The time that it has come to; -inf before the first call that took one."""
        return self._now_s

    def advance(self, now_s: float) -> list[Event]:
        """Events since the last call, up to and including `now_s`, in order."""
        self._roll(now_s)
        events, self._events = self._events, []
        return events

    def next_event_at(self, *, quiet: bool = False) -> float | None:
        """When to call `advance` next. None: nothing will happen without a new request.

        The time is the end of the current pass. With `quiet`, it is the end of the passes in which no request joins or
        leaves. The lookahead is bounded, so the time may be earlier.
        """
        if self._pass is None and self._start_at_s is not None:
            self._begin(self._start_at_s)
        if self._events:
            return self._now_s
        current = self._pass
        if current is None:
            return None if self._held.expiry_s == math.inf else self._held.expiry_s
        if not quiet:
            return current.ends[0]
        ahead = min(current.limit, _LOOK_AHEAD_PASSES) - len(current.ends)
        if ahead > 0:
            self._extend(current, ahead)
        return current.ends[-1]

    # --- time ----------------------------------------------------------------------------------

    def _roll(self, now_s: float) -> None:
        """Bring the schedule to `now_s`. A pass that would begin at that very instant is not yet formed."""
        now_s = self._now_s = max(self._now_s, now_s)
        while True:
            if self._pass is not None:
                if not self._complete(self._pass, now_s):
                    return
            elif self._start_at_s is not None:
                if self._start_at_s >= now_s:
                    return
                self._begin(self._start_at_s)
            elif self._held.expiry_s <= now_s:
                at_s = self._held.expiry_s
                self._expire(at_s)
                self._start_at_s = at_s if self._queue.waiting else None
            else:
                return

    def _touch(self) -> None:
        """A sequence joined or left, so the passes after the current one must be decided anew."""
        if self._pass is None:
            if self._start_at_s is None:
                self._start_at_s = self._now_s
            return
        del self._pass.ends[1:]
        self._pass.limit = 1

    def _expire(self, now_s: float) -> None:
        """Free the hand-offs whose lease is over at `now_s`."""
        for handoff in self._held.pop_expired(now_s):
            self._cache.pool.release(handoff.blocks)
            self._events.append(HandoffExpired(handoff.request_id, now_s))

    # --- forming a pass ------------------------------------------------------------------------

    def _begin(self, start_s: float) -> None:
        """Decide what the pass that starts now computes; none where nothing can run."""
        self._start_at_s = None
        self._expire(start_s)
        preemptions = self.preemptions
        rows, budget = self._continue_running(start_s)
        # After a preemption nobody is admitted (as vLLM), unless nobody runs any more: those whose KV has arrived
        # hold blocks, and only by running will they ever give them back.
        if self.preemptions == preemptions or not rows:
            self._admit(rows, budget, start_s)
        if not rows:
            return
        took_s, kv_tokens, decodes = cost(rows, self._perf)
        quiet = decodes and len(rows) == len(self._running) and self.preemptions == preemptions
        quiet = quiet and not self.config.draft_tokens
        end_s = start_s + took_s / self.config.speed_at(start_s)
        limit = 1
        if quiet and self.config.coalesce:
            limit = quiet_passes(rows, self.config.block_size, self._cache.pool.free)
        scheduled = None if self._watch is None else scheduled_of(rows)
        self._pass = Pass(start_s, rows, [end_s], quiet, limit, kv_tokens, scheduled)

    def _continue_running(self, now_s: float) -> tuple[list[Seq], int]:
        """Rows for the running sequences, in order, and what is left of the budget. May preempt."""
        rows: list[Seq] = []
        budget = self.config.max_num_batched_tokens
        size = self.config.block_size
        position = 0
        while position < len(self._running) and budget:
            seq = self._running[position]
            step = seq.step = min(seq.request.num_prompt_tokens + seq.generated - seq.computed, budget)
            seq.starts = False
            seq.drafts = self._drafts(seq, budget)
            ahead, held = seq.computed + step, len(seq.blocks)
            if (most := ahead + seq.drafts) > held * size and not self._grow(seq, -(-most // size) - held, now_s):
                break
            if seq.stored < len(seq.keys):
                self._cache.store(seq, ahead)
            rows.append(seq)
            budget -= step + seq.drafts
            position += 1
        for seq in self._running[position:]:
            seq.step = 0
        return rows, budget

    def _drafts(self, seq: Seq, budget: int) -> int:
        """Draft tokens of the pass, within the budget and the rest of the answer. The first token has none."""
        if not self.config.draft_tokens or not seq.generated or seq.step != 1:
            return 0
        return min(self.config.draft_tokens, budget - 1, seq.request.num_output_tokens - seq.generated - 1)

    def _grow(self, seq: Seq, need: int, now_s: float) -> bool:
        """Give the sequence `need` more blocks, preempting those admitted last; False if it was preempted itself."""
        while self._cache.pool.free < need:
            victim = self._running.pop()
            self._cache.free(victim)
            victim.computed = victim.stored = victim.step = victim.drafts = 0
            self._queue.put_back(victim)
            self.preemptions += 1
            self._events.append(Preempted(victim.request.request_id, now_s))
            if victim is seq:
                return False
        seq.blocks += self._cache.pool.take(need)
        return True

    def _admit(self, rows: list[Seq], budget: int, now_s: float) -> None:
        """First those whose KV has arrived, then the queue in order, until something runs out."""
        queue = self._queue
        while budget and len(self._running) < self.config.max_num_seqs:
            if queue.pulled:
                seq = queue.admit(queue.pulled)
                seq.step = 1
            elif not queue.waiting:
                return
            elif queue.waiting[0].pull:
                to_pull = self._cache.start_pull(queue.waiting[0])
                if to_pull is None:
                    return
                self._begin_pull(queue.begin_pull(), to_pull, now_s)
                continue
            elif not self._cache.start(queue.waiting[0], budget):
                return
            else:
                seq = queue.admit(queue.waiting)
            self._announce(seq, now_s)
            self._running.append(seq)
            rows.append(seq)
            budget -= seq.step

    def _begin_pull(self, seq: Seq, to_pull: int, now_s: float) -> None:
        """Its blocks are there: ask for the tokens that are not cached here."""
        self._announce(seq, now_s)
        self._events.append(PullReady(seq.request.request_id, now_s, to_pull))

    def _announce(self, seq: Seq, now_s: float) -> None:
        if not seq.announced:
            seq.announced = True
            self._cache.count_hits(seq.request.num_prompt_tokens, seq.computed)
            self._events.append(Started(seq.request.request_id, now_s, seq.computed))

    # --- passing time --------------------------------------------------------------------------

    def _extend(self, run: Pass, passes: int) -> None:
        extend(run, passes, self._perf, speed=self.config.speed_at(run.ends[-1]), expiry_s=self._held.expiry_s)

    def _complete(self, run: Pass, now_s: float) -> bool:
        """End the passes that are over by `now_s`; False if none is."""
        while run.ends[-1] <= now_s and len(run.ends) < run.limit:
            self._extend(run, min(run.limit - len(run.ends), _LOOK_AHEAD_PASSES))
        count = bisect_right(run.ends, now_s)
        if not count:
            return False
        end_s = run.ends[count - 1]
        self.passes += count
        if self._watch is not None:
            self._watch.extend(passes_done(run, count, self._queue.seen()))
        if run.quiet or any(seq.computed + 1 == seq.total for seq in run.rows):
            self._itl_s = end_s - (run.ends[count - 2] if count > 1 else run.start_s)
        whole = count == run.limit
        # A pass that begins right now is formed anew, so that requests of this instant can join it.
        over = whole or end_s == now_s
        if run.quiet:
            self._events += advance_rows(run, count, self._cache, over=over)
        else:
            ended = end_rows(run, end_s, self.config.accept_length)
            self._events += ended
            if self.config.draft_tokens and ended:
                self._count_drafts(run.rows, ended)
        if over:
            self._pass, self._start_at_s = None, end_s
            if whole:
                self._finish(run.rows, end_s)
        else:
            run.start_s = end_s
            del run.ends[:count]
            run.limit -= count
            run.kv_tokens += len(run.rows) * count
            run.scheduled = None if run.scheduled is None else one_later(run.scheduled, count)
        return True

    def _count_drafts(self, rows: list[Seq], ended: list[Tokens]) -> None:
        """A pass that gives a sequence several tokens counts as several waits between tokens."""
        tokens = sum(len(event.times_s) for event in ended)
        self.drafts += sum(seq.drafts > 0 for seq in rows)
        self.accepted += tokens - len(ended)
        if self._itl_s is not None:
            self._itl_s *= len(ended) / tokens

    def _finish(self, rows: list[Seq], now_s: float) -> None:
        done = [seq for seq in rows if seq.generated >= seq.request.num_output_tokens]
        if not done:
            return
        for seq in done:
            request = seq.request
            del self._seqs[request.request_id]
            handoff = None
            if request.hold_kv:
                expires_at_s = now_s + self.config.kv_lease_duration_s
                handoff = Handoff(request.request_id, seq.blocks, request.num_prompt_tokens, expires_at_s)
                self._held.hold(handoff)
            else:
                self._cache.free(seq)
            self._events.append(Finished(request.request_id, now_s, request.finish_reason, handoff))
        self._running = [seq for seq in self._running if seq.request.request_id in self._seqs]
