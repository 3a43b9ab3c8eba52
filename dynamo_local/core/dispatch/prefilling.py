"""Prefill here, or in a prefill worker? By what each will cost, in requests that miss a target.

Local: the prompt waits for those before it here, and every stream that runs here pauses while it is computed.
Remote: it waits for its turn in the prefill queue, and nobody pauses. What costs fewer expected misses is done; where
both cost the same, what makes people wait less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_local.core.disagg import QueueView
from dynamo_local.core.dispatch.learning import AnswerLengths, Correction, Mean
from dynamo_local.core.dispatch.line import LATE_EVERY
from dynamo_local.core.dispatch.misses import Stream, harm, misses_first_token
from dynamo_local.core.dispatch.targets import Targets, Timing
from dynamo_local.core.types import Missing

WAIT_COST = 0.02
"""What a second of somebody's waiting counts, in misses: it decides where no target is at risk."""
KEEP_WORK_WEIGHT = 0.05
"""How much one prompt counts in the mean work of all."""
DEFAULT_PASS_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt. `waited_s` is since the request came."""

    prompt_tokens: int
    cached_tokens: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done, and why: estimates in seconds from now to the first token, costs in expected misses.

    `start_by_s` is when (same clock as `decide`'s) a prefill worker has to begin for the target to be kept; None: there
    is no target. `remote_s` and `local_s` are None where that way is closed.
    """

    remote: bool
    reason: str
    local_s: float | None = None
    remote_s: float | None = None
    harmed: float = 0.0
    work_s: float = 0.0
    start_by_s: float | None = None
    fallback: bool = False


@dataclass(slots=True)
class _Request:
    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    generated: int = 0
    local_tokens: int | None = None
    """Uncached tokens of a prompt that is to be computed here."""
    away_work_s: float | None = None
    """What its prefill elsewhere takes, while it is awaited."""
    estimated_s: float | None = None
    asked_s: float = 0.0
    handed_s: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Of a prompt that is to be computed here."""
        return self.prompt_tokens - (self.local_tokens or 0)


class DecodeSide:
    """What one decode worker knows of its requests, and its decisions.

    It is told of each request's way: `began`, then `went_local` or `went_remote` (and `handed_over`), then `tokens`,
    and `ended` whatever came of it. Calls for requests that it does not know are no errors: they may have ended.
    """

    def __init__(
        self,
        timing: Timing,
        targets: Targets,
        *,
        max_kv_tokens: int | None = None,
        max_pass_tokens: int | None = None,
    ) -> None:
        self._timing = timing
        self._targets = targets
        self._max_kv_tokens = max_kv_tokens or timing.perf.max_kv_tokens
        self._pass_tokens = max_pass_tokens or DEFAULT_PASS_TOKENS
        self._requests: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        self._prompts: dict[str, _Request] = {}
        self._away: dict[str, _Request] = {}
        self._kv_tokens = 0
        self._held_tokens = 0
        self._head_since_s = 0.0
        self.lengths = AnswerLengths()
        self.remote_correction = Correction()
        self.local_correction = Correction()
        self.itl_correction = Correction()
        self._work_s = Mean(KEEP_WORK_WEIGHT)
        self._handover_s = Mean(KEEP_WORK_WEIGHT)

    # --- what it is told -----------------------------------------------------------------------

    def began(self, request_id: str, prompt_tokens: int, now_s: float) -> None:
        """A request has come."""
        self._requests[request_id] = _Request(prompt_tokens, now_s)

    def went_local(self, request_id: str, uncached_tokens: int, now_s: float, estimated_s: float | None = None) -> None:
        """Its prompt is computed here from now on, also one that was away before. `estimated_s` (uncorrected) is what
        that was thought to take."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._away.pop(request_id, None)
        self._hold(request_id, request)
        request.away_work_s, request.handed_s = None, None
        request.local_tokens = max(1, uncached_tokens)
        request.estimated_s, request.asked_s = estimated_s, now_s
        if not self._prompts:
            self._head_since_s = now_s
        self._prompts[request_id] = request

    def went_remote(self, request_id: str, work_s: float, now_s: float, estimated_s: float | None = None) -> None:
        """Its entry is in the prefill queue. `estimated_s` (uncorrected) is to the end of its prefill."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.away_work_s, request.estimated_s, request.asked_s = work_s, estimated_s, now_s
        self._away[request_id] = request

    def handed_over(self, request_id: str, now_s: float) -> None:
        """Its KV is there to be pulled."""
        request = self._away.pop(request_id, None)
        if request is None:
            return
        self._hold(request_id, request)
        request.away_work_s, request.handed_s = None, now_s
        if request.estimated_s is not None:
            self.remote_correction.seen(now_s - request.asked_s, request.estimated_s)

    def tokens(self, request_id: str, count: int, now_s: float) -> None:
        """So many more tokens of its answer have come."""
        request = self._requests.get(request_id)
        if request is None or count < 1:
            return
        if request.first_s is None:
            self._first(request_id, request, now_s)
        request.generated += count
        self._kv_tokens += count

    def ended(self, request_id: str, *, completed: bool = True) -> None:
        """It is answered; not `completed`: given up."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._away.pop(request_id, None)
        self._prompts.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            self._kv_tokens -= request.prompt_tokens + request.generated
        if request.handed_s is not None or request.local_tokens is not None:
            self._held_tokens -= request.prompt_tokens
        if completed and request.generated:
            self.lengths.ended(request.generated)

    def _hold(self, request_id: str, request: _Request) -> None:
        if request.handed_s is None and request.local_tokens is None:
            self._held_tokens += request.prompt_tokens

    def _first(self, request_id: str, request: _Request, now_s: float) -> None:
        request.first_s = now_s
        if self._prompts.pop(request_id, None) is not None:
            self._head_since_s = now_s
            if request.estimated_s is not None:
                self.local_correction.seen(now_s - request.asked_s, request.estimated_s)
        if request.handed_s is not None:
            self._handover_s.seen(now_s - request.handed_s)
        self._running[request_id] = request
        self._kv_tokens += request.prompt_tokens

    # --- what can be asked ---------------------------------------------------------------------

    def is_away(self, request_id: str) -> bool:
        """Whether its prefill elsewhere is awaited."""
        return request_id in self._away

    def waited_s(self, request_id: str, now_s: float) -> float:
        """Since it came here; 0.0 of one that is not known."""
        request = self._requests.get(request_id)
        return 0.0 if request is None else max(0.0, now_s - request.began_s)

    @property
    def running(self) -> int:
        """Answers that run."""
        return len(self._running)

    def itl_s(self) -> float:
        """A token's time now, with all that run (of one, where none does)."""
        batch = max(1, len(self._running))
        return self._timing.itl_s(batch, max(1, self._kv_tokens)) * self.itl_correction.factor

    def backlog_s(self, now_s: float) -> float:
        """Seconds until the prompts that wait here, or elsewhere for this worker, are computed (0 or more)."""
        away_s = math.fsum(each.away_work_s or 0.0 for each in self._away.values())
        return max(self._before_s(now_s), away_s)

    def itl_seen(self, itl_s: float) -> None:
        """The engine's last pass that only decoded took so long."""
        if self._running:
            self.itl_correction.seen(itl_s, self._timing.itl_s(len(self._running), max(1, self._kv_tokens)))

    def start_by_s(self, ask: Ask, now_s: float) -> float | None:
        """When a prefill worker has to begin this prompt; None: there is no target."""
        if self._targets.ttft_s is None:
            return None
        return now_s + self._targets.ttft_s - ask.waited_s - self._timing.prefill_s(ask.prompt_tokens) - self._after_s()

    def decide(self, ask: Ask, now_s: float, *, queue: QueueView | Missing, prefill_workers: int) -> Choice:
        """Here or there. A queue of unknown length is not an empty one: then nothing goes there, and `fallback` says
        that it was no choice."""
        work_s = self._timing.prefill_s(ask.prompt_tokens)
        self._work_s.seen(work_s)
        local_s, pause_before_s, pause_s = self._local(ask, now_s)
        start_by_s = self.start_by_s(ask, now_s)
        if prefill_workers < 1:
            return Choice(False, "no prefill worker is registered", local_s, work_s=work_s, start_by_s=start_by_s)
        if isinstance(queue, Missing):
            why = f"prefill queue size unknown: {queue.reason}"
            return Choice(False, why, local_s, work_s=work_s, start_by_s=start_by_s, fallback=True)
        left_s = None if self._targets.ttft_s is None else self._targets.ttft_s - ask.waited_s
        remote_s = self._remote_s(work_s, queue, prefill_workers)
        harmed = harm(
            self._streams(),
            now_s,
            before_s=pause_before_s,
            more_s=pause_s,
            itl_s=self.itl_s(),
            target_s=self._targets.itl_s,
            lengths=self.lengths,
        )
        fits = self._held_tokens + self._away_tokens() + ask.prompt_tokens <= self._max_kv_tokens
        local_cost = (misses_first_token(local_s, left_s) if fits or left_s is None else 1.0) + harmed
        remote_cost = misses_first_token(remote_s, left_s)
        local_total = local_cost + WAIT_COST * (local_s + pause_s * len(self._running))
        remote_total = remote_cost + WAIT_COST * remote_s
        remote = remote_total <= local_total
        reason = (
            f"first token in {local_s * 1000:.0f} ms here, {remote_s * 1000:.0f} ms there; "
            f"expected misses {local_cost:.2f} here ({harmed:.2f} of {len(self._running)} streams), "
            f"{remote_cost:.2f} there"
        )
        return Choice(remote, reason, local_s, remote_s, harmed, work_s, start_by_s)

    def estimates(self, choice: Choice) -> float | None:
        """The uncorrected estimate behind a choice, for `went_local` or `went_remote`."""
        if choice.remote:
            if choice.remote_s is None:
                return None
            return max(1e-6, choice.remote_s - self._after_s()) / self.remote_correction.factor
        return None if choice.local_s is None else choice.local_s / self.local_correction.factor

    # --- estimates -----------------------------------------------------------------------------

    def _streams(self) -> list[Stream]:
        return [Stream(each.generated, each.first_s) for each in self._running.values() if each.first_s is not None]

    def _away_tokens(self) -> int:
        return sum(each.prompt_tokens for each in self._away.values())

    def _local(self, ask: Ask, now_s: float) -> tuple[float, float, float]:
        """Seconds to the first token here; for how long streams pause anyway; and for how long because of this one."""
        factor, timing = self.local_correction.factor, self._timing
        before_s = self._before_s(now_s)
        uncached = ask.prompt_tokens - ask.cached_tokens
        own_s = timing.prefill_s(ask.prompt_tokens, ask.cached_tokens)
        tokens = uncached + sum(each.local_tokens or 0 for each in self._prompts.values())
        room = max(1, self._pass_tokens - len(self._running))
        passes = math.ceil(tokens / room) + (0.5 if self._running else 0.0)
        decoding_s = self.itl_s() * passes if self._running else 0.0
        return (before_s + own_s) * factor + decoding_s, before_s * factor, own_s * factor

    def _before_s(self, now_s: float) -> float:
        """What is left to compute of the prompts that are here (uncorrected)."""
        works_s = [self._timing.prefill_s(each.prompt_tokens, each.cached_tokens) for each in self._prompts.values()]
        before_s = math.fsum(works_s)
        if works_s:  # the first of them has been computed for a while
            before_s -= min(works_s[0], max(0.0, now_s - self._head_since_s))
        return before_s

    def _after_s(self) -> float:
        """From the end of a remote prefill to the first token here."""
        seen = self._handover_s.value
        return 1.5 * self.itl_s() if seen is None else seen

    def _remote_s(self, work_s: float, queue: QueueView, workers: int) -> float:
        own = len(self._away)
        outstanding = max(queue.outstanding, queue.pending, own)
        mean_s = self._work_s.value or work_s
        wait_s = 0.0
        if outstanding:
            own_s = math.fsum(each.away_work_s or 0.0 for each in self._away.values())
            each_s = (own_s + (outstanding - own) * mean_s) / outstanding
            computing = outstanding - queue.pending
            # Of those that are late, one comes before this one at every so many turns.
            first = queue.pending - queue.late
            wait_s = (first + min(queue.late, first / (LATE_EVERY - 1))) * each_s / workers
            if computing >= workers:
                wait_s += each_s / (workers + 1)
        return (wait_s + work_s) * self.remote_correction.factor + self._after_s()
