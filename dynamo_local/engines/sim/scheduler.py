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
from collections.abc import Hashable, Sequence
from itertools import accumulate

from dynamo_local.core.kv_events import KvEvent
from dynamo_local.engines.sim.blocks import BlockPool
from dynamo_local.engines.sim.handoffs import Handoff, HandoffTable
from dynamo_local.engines.sim.perf import PerfModel
from dynamo_local.engines.sim.quiet import quiet_passes
from dynamo_local.engines.sim.requests import (
    Event,
    Finished,
    HandoffExpired,
    Pass,
    Preempted,
    PullReady,
    SchedulerConfig,
    Seq,
    SimRequest,
    Started,
    Tokens,
)

_LOOK_AHEAD_PASSES = 64
"""How far `next_event_at(quiet=True)` looks: what an arrival in between would make useless stays small."""

_HIT_RATE_REQUESTS = 1000
"""The prefix hit rate covers the last thousand requests, as vLLM's does."""


class SimScheduler:
    """One engine's scheduler and KV cache.

    Call `advance(now_s)` whenever `next_event_at()` is reached. The other calls take the time too, and first bring the
    schedule to it; the events of that are returned by the next `advance`. Calls at the instant at which a pass begins
    still join it, until `next_event_at` or a later time is asked for. `journal` gets the KV cache's events, where the
    requests' keys are block hashes.
    """

    def __init__(self, config: SchedulerConfig, perf: PerfModel, journal: list[KvEvent] | None = None) -> None:
        self.config = config
        self._perf = perf
        self._pool = BlockPool(config.num_gpu_blocks, journal)
        self._seqs: dict[str, Seq] = {}
        self._waiting: deque[Seq] = deque()
        self._pulling: dict[str, Seq] = {}
        self._pulled: deque[Seq] = deque()
        self._running: list[Seq] = []
        self._held = HandoffTable()
        self._pass: Pass | None = None
        self._start_at_s: float | None = None
        self._now_s = -math.inf
        self._events: list[Event] = []
        self._queried: deque[tuple[int, int]] = deque()
        self._queried_tokens = self._hit_tokens = 0
        self._itl_s: float | None = None
        self.preemptions = 0
        self.passes = 0

    # --- what can be seen (as of the last call that took a time) -------------------------------

    @property
    def pool(self) -> BlockPool:
        """The KV blocks; for reading."""
        return self._pool

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Not yet running: queued, preempted, or with their KV on its way (as vLLM counts)."""
        return len(self._waiting) + len(self._pulling) + len(self._pulled)

    @property
    def num_held(self) -> int:
        """Hand-offs neither pulled nor expired."""
        return len(self._held)

    @property
    def running_ids(self) -> list[str]:
        """In the order of admission."""
        return [seq.request.request_id for seq in self._running]

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
        return self._hit_tokens / self._queried_tokens if self._queried_tokens else 0.0

    def matched_tokens(self, block_keys: Sequence[Hashable]) -> int:
        """How many tokens of a prompt with these full blocks are cached now."""
        return len(self._pool.match(block_keys, len(block_keys))) * self.config.block_size

    # --- what can be done ----------------------------------------------------------------------

    def submit(self, request: SimRequest, now_s: float) -> None:
        """Queue a request. Raises ValueError if it can never run or its id is in use."""
        self._roll(now_s)
        capacity = self.config.num_gpu_blocks * self.config.block_size
        # The last output token's KV is never computed.
        if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
            raise ValueError(f"request {request.request_id}: a prompt and an output have 1 token or more")
        if request.num_prompt_tokens + request.num_output_tokens - 1 > capacity:
            raise ValueError(f"request {request.request_id} does not fit the KV cache of {capacity} tokens")
        if request.request_id in self._seqs or request.request_id in self._held:
            raise ValueError(f"request id {request.request_id} is in use")
        seq = Seq(request, request.block_keys, request.pull_kv)
        self._seqs[request.request_id] = seq
        self._waiting.append(seq)
        self._touch()

    def abort(self, request_id: str, now_s: float) -> None:
        """End a request without another event for it; an unknown one is no error. The pass under way still ends."""
        self._roll(now_s)
        seq = self._seqs.pop(request_id, None)
        if seq is None:
            return
        if self._pulling.pop(request_id, None) is None:
            for place in (self._running, self._waiting, self._pulled):
                if seq in place:
                    place.remove(seq)
        if self._pass is not None and seq in self._pass.rows:
            self._pass.rows.remove(seq)
        self._free(seq)
        self._touch()

    def pulled(self, request_id: str, now_s: float) -> None:
        """The KV that `PullReady` asked for is here. KeyError if the request is not pulling."""
        self._roll(now_s)
        seq = self._pulling.pop(request_id)
        # The last prompt token is computed here: its logits give this engine's first token (as in vLLM).
        seq.computed = seq.request.num_prompt_tokens - 1
        seq.pull = False
        self._store(seq, seq.request.num_prompt_tokens)
        self._pulled.append(seq)
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
            self._pool.release(handoff.blocks)
            self._touch()

    def reset_prefix_cache(self, now_s: float) -> bool:
        """Forget what is cached; False, and nothing is changed, while any request holds blocks (as vLLM's)."""
        self._roll(now_s)
        return self._pool.clear()

    def advance(self, now_s: float) -> list[Event]:
        """What happened up to and including `now_s`, in order, since the last call."""
        self._roll(now_s)
        events, self._events = self._events, []
        return events

    def next_event_at(self, *, quiet: bool = False) -> float | None:
        """When to call `advance` next; None if nothing will happen by itself.

        That is the end of the current pass; with `quiet`, of the run of passes in which nobody joins or leaves
        (looking ahead a bounded number of passes, so sometimes earlier).
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
                self._start_at_s = at_s if self._waiting else None
            else:
                return

    def _touch(self) -> None:
        """Somebody joined or left: no pass after the current one is decided any more."""
        if self._pass is None:
            if self._start_at_s is None:
                self._start_at_s = self._now_s
            return
        del self._pass.ends[1:]
        self._pass.limit = 1

    def _expire(self, now_s: float) -> None:
        """Free the hand-offs whose lease is over at `now_s`."""
        for handoff in self._held.pop_expired(now_s):
            self._pool.release(handoff.blocks)
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
        quiet = len(rows) == len(self._running) and self.preemptions == preemptions
        launch_s, prefill_s, batch, kv_tokens = 0.0, 0.0, 0, 0
        for seq in rows:
            total = seq.request.num_prompt_tokens + seq.generated
            if seq.computed + 1 == total:
                # One token at the end, whoever computed the rest: to the GPU that is a decode row.
                batch += 1
                kv_tokens += total
                continue
            quiet = False
            prefill_s += self._perf.prefill_s(seq.computed, seq.step)
            if seq.starts:
                launch_s = self._perf.launch_s
        decode_s = self._perf.decode_s(batch, kv_tokens, kv_tokens / batch) if batch else 0.0
        end_s = start_s + (launch_s + prefill_s + decode_s) / self.config.speed
        limit = quiet_passes(rows, self.config.block_size, self._pool.free) if quiet and self.config.coalesce else 1
        self._pass = Pass(start_s, rows, [end_s], quiet, limit, kv_tokens)

    def _continue_running(self, now_s: float) -> tuple[list[Seq], int]:
        """Rows for those who run already, in order, and what is left of the budget. May preempt."""
        rows: list[Seq] = []
        budget = self.config.max_num_batched_tokens
        size = self.config.block_size
        position = 0
        while position < len(self._running) and budget:
            seq = self._running[position]
            seq.step = min(seq.request.num_prompt_tokens + seq.generated - seq.computed, budget)
            seq.starts = False
            need = -(-(seq.computed + seq.step) // size) - len(seq.blocks)
            if need > 0 and not self._grow(seq, need, now_s):
                break
            self._store(seq, seq.computed + seq.step)
            rows.append(seq)
            budget -= seq.step
            position += 1
        for seq in self._running[position:]:
            seq.step = 0
        return rows, budget

    def _grow(self, seq: Seq, need: int, now_s: float) -> bool:
        """So many more blocks, at the expense of those admitted last; False if it had to give up itself."""
        while self._pool.free < need:
            victim = self._running.pop()
            self._free(victim)
            victim.computed = victim.stored = victim.step = 0
            self._waiting.appendleft(victim)
            self.preemptions += 1
            self._events.append(Preempted(victim.request.request_id, now_s))
            if victim is seq:
                return False
        seq.blocks += self._pool.take(need)
        return True

    def _admit(self, rows: list[Seq], budget: int, now_s: float) -> None:
        """First those whose KV has arrived, then the queue in order, until something runs out."""
        while budget and len(self._running) < self.config.max_num_seqs:
            if self._pulled:
                seq = self._pulled.popleft()
                seq.step = 1
            elif not self._waiting:
                return
            elif self._waiting[0].pull:
                if not self._begin_pull(self._waiting[0], now_s):
                    return
                self._waiting.popleft()
                continue
            elif not self._start(self._waiting[0], budget):
                return
            else:
                seq = self._waiting.popleft()
            self._announce(seq, now_s)
            self._running.append(seq)
            rows.append(seq)
            budget -= seq.step

    def _start(self, seq: Seq, budget: int) -> bool:
        """Give the first chunk its blocks, cached ones first; False if there are too few."""
        size = self.config.block_size
        if seq.generated and seq.request.output_keys is not None:
            seq.keys = [*seq.request.block_keys, *seq.request.output_keys(seq.total - 1)]
        # The last token is always computed: its logits are what the next token comes from.
        matched = self._pool.match(seq.keys, (seq.total - 1) // size)
        cached = len(matched) * size
        step = min(seq.total - cached, budget)
        need = -(-(cached + step) // size) - len(matched)
        if not self._pool.can_take(matched, need):
            return False
        self._pool.share(matched)
        seq.blocks = matched + self._pool.take(need)
        seq.computed, seq.stored, seq.step, seq.starts = cached, len(matched), step, True
        self._store(seq, cached + step)
        return True

    def _begin_pull(self, seq: Seq, now_s: float) -> bool:
        """Allocate the whole prompt and ask for what is not cached here; False if there are too few blocks."""
        size, prompt = self.config.block_size, seq.request.num_prompt_tokens
        matched = self._pool.match(seq.keys, prompt // size)
        need = -(-prompt // size) - len(matched)
        if not self._pool.can_take(matched, need):
            return False
        self._pool.share(matched)
        seq.blocks = matched + self._pool.take(need)
        seq.computed, seq.stored = min(len(matched) * size, prompt - 1), len(matched)
        self._pulling[seq.request.request_id] = seq
        self._announce(seq, now_s)
        self._events.append(PullReady(seq.request.request_id, now_s, prompt - len(matched) * size))
        return True

    def _announce(self, seq: Seq, now_s: float) -> None:
        if not seq.announced:
            seq.announced = True
            self._count_hits(seq.request.num_prompt_tokens, seq.computed)
            self._events.append(Started(seq.request.request_id, now_s, seq.computed))

    def _count_hits(self, tokens: int, hits: int) -> None:
        self._queried.append((tokens, hits))
        self._queried_tokens += tokens
        self._hit_tokens += hits
        if len(self._queried) > _HIT_RATE_REQUESTS:
            tokens, hits = self._queried.popleft()
            self._queried_tokens -= tokens
            self._hit_tokens -= hits

    def _store(self, seq: Seq, computed: int) -> None:
        """Tell the pool what this pass fills blocks with (as vLLM: at scheduling, so that neighbours share)."""
        full = min(computed // self.config.block_size, len(seq.keys))
        if full > seq.stored:
            parent = seq.keys[seq.stored - 1] if seq.stored else None
            self._pool.store(seq.blocks[seq.stored : full], seq.keys[seq.stored : full], parent)
            seq.stored = full

    def _free(self, seq: Seq) -> None:
        """Give the blocks back; full ones of the output become reusable now, those of the prompt are already."""
        size = self.config.block_size
        full = seq.computed // size
        if seq.request.output_keys is not None and seq.generated and full > seq.stored:
            every = [*seq.request.block_keys, *seq.request.output_keys(seq.computed)]
            keys = every[seq.stored : full]
            parent = every[seq.stored - 1] if seq.stored else None
            self._pool.store(seq.blocks[seq.stored : seq.stored + len(keys)], keys, parent)
        self._pool.release(seq.blocks)
        seq.blocks = []

    # --- passing time --------------------------------------------------------------------------

    def _extend(self, run: Pass, passes: int) -> None:
        """So many more ends of the run; or its limit, where a lease ends before the next pass begins."""
        ends, batch, speed, expiry_s = run.ends, len(run.rows), self.config.speed, self._held.expiry_s
        durations = self._perf.decode_run_s(batch, run.kv_tokens + batch * len(ends), passes)
        if speed != 1.0:
            durations = [decode_s / speed for decode_s in durations]
        later = list(accumulate(durations, initial=ends[-1]))
        begun = bisect_left(later, expiry_s)
        if begun < passes:
            # The pass that would begin at or after the lease's end is not this run's any more.
            run.limit = len(ends) + begun
        ends += later[1 : begun + 1]

    def _complete(self, run: Pass, now_s: float) -> bool:
        """End the passes that are over by `now_s`; False if none is."""
        while run.ends[-1] <= now_s and len(run.ends) < run.limit:
            self._extend(run, min(run.limit - len(run.ends), _LOOK_AHEAD_PASSES))
        count = bisect_right(run.ends, now_s)
        if not count:
            return False
        end_s = run.ends[count - 1]
        self.passes += count
        if run.quiet or any(seq.computed + 1 == seq.total for seq in run.rows):
            self._itl_s = end_s - (run.ends[count - 2] if count > 1 else run.start_s)
        whole = count == run.limit
        # A pass that begins right now is formed anew, so that who comes at this instant can join it.
        over = whole or end_s == now_s
        if run.quiet:
            self._advance_rows(run, count, over)
        else:
            self._end_rows(run, end_s)
        if over:
            self._pass, self._start_at_s = None, end_s
            if whole:
                self._finish(run.rows, end_s)
        else:
            run.start_s = end_s
            del run.ends[:count]
            run.limit -= count
            run.kv_tokens += len(run.rows) * count
        return True

    def _end_rows(self, run: Pass, end_s: float) -> None:
        """A pass with prompts in it: who has computed all of its tokens gets one more."""
        times = (end_s,)
        for seq in run.rows:
            seq.computed += seq.step
            if seq.computed == seq.total:
                self._events.append(Tokens(seq.request.request_id, seq.generated, times))
                seq.generated += 1

    def _advance_rows(self, run: Pass, count: int, over: bool) -> None:
        """`count` quiet passes: a token each. Blocks are taken in the order in which pass by pass would take them."""
        times = tuple(run.ends[:count])
        size = self.config.block_size
        formed = count - 1 if over else count
        crossings: list[tuple[int, int]] = []
        events = self._events
        for row, seq in enumerate(run.rows):
            events.append(Tokens(seq.request.request_id, seq.generated, times))
            at = -seq.computed % size or size
            while at <= formed:
                crossings.append((at, row))
                at += size
            seq.computed += count
            seq.generated += count
        for _, row in sorted(crossings):
            run.rows[row].blocks += self._pool.take(1)

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
                self._free(seq)
            self._events.append(Finished(request.request_id, now_s, request.finish_reason, handoff))
        gone = set(map(id, done))
        self._running = [seq for seq in self._running if id(seq) not in gone]
