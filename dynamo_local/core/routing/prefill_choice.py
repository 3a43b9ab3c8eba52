"""Prefill here, or in a prefill worker? The expected number of requests that miss a target decides.

Local: the prompt waits for those before it here, and every stream that runs here pauses while it is computed.
Remote: it waits for its turn in the prefill queue, and nobody pauses. The way with
fewer expected misses is taken. If both cost the same, the way with the shorter wait is taken.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from dynamo_local.core.routing.disagg import QueueView
from dynamo_local.core.routing.estimates import (
    AnswerLengths,
    Correction,
    FirstTokens,
    Mean,
    Risk,
    Share,
    Stream,
    Targets,
    Timing,
    Why,
    gap_above,
    harm,
    likely_above,
    misses_first_token,
    misses_gap,
)
from dynamo_local.core.routing.prompts import LATE_EVERY, Ask, Choice, Promise, Request, Way
from dynamo_local.core.types import Missing

WAIT_COST = 0.02
"""The weight of one second of waiting, in misses. It decides if no target is at risk."""
KEEP_WORK_WEIGHT = 0.05
"""How much one prompt counts in the mean work of all."""
DEFAULT_PASS_TOKENS = 8192
PAUSES_OVER_S = 5.0
"""Over so long a time it is remembered which share of it the prompts here took from the streams."""
PAUSED_MAX = 0.9
"""More than this share is not believed: something is decoded all the same."""


class Here(NamedTuple):
    """A prompt that is computed here: seconds to its first token, for how long streams pause anyway, and for how long
    because of it."""

    first_token_s: float
    before_s: float
    pause_s: float


def _believed(share: float) -> float:
    return likely_above(share, 1.0)


class DecodeSide:
    """One decode worker's record of its requests, and its decisions.

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
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._prompts: dict[str, Request] = {}
        self._away: dict[str, Request] = {}
        self._coming: dict[str, Request] = {}
        self._kv_tokens = 0
        self._held_tokens = 0
        self._head_since_s = 0.0
        self.lengths = AnswerLengths()
        self.remote_correction = Correction()
        self.local_correction = Correction()
        self.itl_correction = Correction()
        self._work_s = Mean(KEEP_WORK_WEIGHT)
        self._handover_s = Mean(KEEP_WORK_WEIGHT)
        self._paused = Share(PAUSES_OVER_S)
        self._paused_until_s = -math.inf
        self._risks: dict[Way, Risk] = {"local": Risk(_believed), "remote": Risk(_believed)}
        self.first_tokens: dict[Way, FirstTokens] = {"local": FirstTokens(), "remote": FirstTokens()}
        """The results of the estimates of prompts that went where it was chosen."""

    # --- what it is told -----------------------------------------------------------------------

    def began(self, request_id: str, prompt_tokens: int, now_s: float) -> None:
        """A request has come."""
        self._requests[request_id] = Request(prompt_tokens, now_s)

    def went_local(self, request_id: str, uncached_tokens: int, now_s: float, estimated_s: float | None = None) -> None:
        """Its prompt is computed here from now on, also one that was away before. `estimated_s` (uncorrected) is what
        that was thought to take."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._away.pop(request_id, None)
        self._coming.pop(request_id, None)
        self._hold(request_id, request)
        request.away_work_s, request.handed_s = None, None
        request.local_tokens = max(1, uncached_tokens)
        request.estimated_s, request.asked_s, request.promised = estimated_s, now_s, None
        if not self._prompts:
            self._head_since_s = now_s
        self._prompts[request_id] = request

    def went_remote(
        self, request_id: str, work_s: float, now_s: float, estimated_s: float | None = None, behind_s: float = 0.0
    ) -> None:
        """Its entry is in the prefill queue. `estimated_s` (uncorrected) is to the end of its prefill, `behind_s` what
        it is thought to wait here after that."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.away_work_s, request.estimated_s, request.asked_s = work_s, estimated_s, now_s
        request.behind_s = behind_s
        self._away[request_id] = self._coming[request_id] = request

    def follow(self, request_id: str, ask: Ask, choice: Choice, now_s: float) -> None:
        """The choice is carried out: `went_remote` or `went_local`, with the estimates behind it."""
        if choice.remote:
            self.went_remote(request_id, choice.work_s, now_s, choice.estimated_s, choice.behind_s)
        else:
            self.went_local(request_id, ask.prompt_tokens - ask.cached_tokens, now_s, choice.estimated_s)
        request = self._requests.get(request_id)
        if request is not None and choice.first_token_s is not None:
            way: Way = "remote" if choice.remote else "local"
            request.promised = Promise(way, choice.first_token_s, now_s, self._left_s(ask))

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
        self._coming.pop(request_id, None)
        self._prompts.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            self._kv_tokens -= request.prompt_tokens + request.generated
        if request.handed_s is not None or request.local_tokens is not None:
            self._held_tokens -= request.prompt_tokens
        if completed and request.generated:
            self.lengths.ended(request.generated)

    def _hold(self, request_id: str, request: Request) -> None:
        if request.handed_s is None and request.local_tokens is None:
            self._held_tokens += request.prompt_tokens

    def _first(self, request_id: str, request: Request, now_s: float) -> None:
        request.first_s = now_s
        self._coming.pop(request_id, None)
        if self._prompts.pop(request_id, None) is not None:
            self._head_since_s = self._paused_until_s = now_s
            self._paused.add(self._timing.prefill_s(request.prompt_tokens, request.cached_tokens), now_s)
            if request.estimated_s is not None:
                self.local_correction.seen(now_s - request.asked_s, request.estimated_s)
        if request.handed_s is not None:
            self._handover_s.seen(max(0.0, now_s - request.handed_s - request.behind_s))
        if request.promised is not None:
            way, estimated_s, at_s, left_s = request.promised
            self.first_tokens[way].came(estimated_s, now_s - at_s)
            if left_s is not None and left_s > 0:
                self._risks[way].seen(estimated_s / left_s, missed=now_s - at_s > left_s)
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

    def itl_seen(self, itl_s: float, now_s: float) -> None:
        """The engine's last pass that decoded took so long. One that also computed a prompt says nothing of a token's
        time, and is left out."""
        if self._running and not self._prompts and now_s - itl_s > self._paused_until_s:
            self.itl_correction.seen(itl_s, self._timing.itl_s(len(self._running), max(1, self._kv_tokens)))

    def start_by_s(self, ask: Ask, now_s: float) -> float | None:
        """When a prefill worker has to begin this prompt; None: there is no target."""
        if self._targets.ttft_s is None:
            return None
        work_s = self._timing.prefill_s(ask.prompt_tokens)
        return now_s + self._targets.ttft_s - ask.waited_s - work_s - self._takeover_s()

    def decide(self, ask: Ask, now_s: float, *, queue: QueueView | Missing, prefill_workers: int) -> Choice:
        """Here or there. A queue of unknown length is not an empty one: then nothing goes there, and `fallback` says
        that it was no choice."""
        work_s = self._timing.prefill_s(ask.prompt_tokens)
        self._work_s.seen(work_s)
        here = self._local(ask, now_s)
        only = Choice(
            False,
            "no prefill worker is registered",
            here.first_token_s,
            work_s=work_s,
            start_by_s=self.start_by_s(ask, now_s),
            estimated_s=here.first_token_s / self.local_correction.factor,
            why=Why.NO_PREFILL_WORKER,
        )
        if prefill_workers < 1:
            return only
        if isinstance(queue, Missing):
            why = f"prefill queue size unknown: {queue.reason}"
            return replace(only, reason=why, fallback=True, why=Why.QUEUE_UNKNOWN)
        prefilled_s = self._prefilled_s(work_s, queue, prefill_workers)
        behind_s = max(0.0, here.before_s - prefilled_s)
        remote_s = prefilled_s + behind_s + self._takeover_s()
        gap_s = self._paused_itl_s(now_s)
        harmed = self._harmed(ask, now_s, here, gap_s)
        local_cost, remote_cost = self._misses(ask, here.first_token_s, remote_s, gap_s)
        local_cost += harmed
        local_total = local_cost + WAIT_COST * (here.first_token_s + here.pause_s * len(self._running))
        remote = remote_cost + WAIT_COST * remote_s <= local_total
        better = (remote_cost < local_cost) if remote else (local_cost < remote_cost)
        return replace(
            only,
            remote=remote,
            reason=f"first token in {here.first_token_s * 1000:.0f} ms here, {remote_s * 1000:.0f} ms there; "
            f"expected misses {local_cost:.2f} here ({harmed:.2f} of {len(self._running)} streams), "
            f"{remote_cost:.2f} there",
            remote_s=remote_s,
            harmed=harmed,
            estimated_s=prefilled_s / self.remote_correction.factor if remote else only.estimated_s,
            behind_s=behind_s,
            why=Why.FEWER_MISSES if better else Why.SOONER,
        )

    # --- what it costs -------------------------------------------------------------------------

    def _misses(self, ask: Ask, local_s: float, remote_s: float, gap_s: float) -> tuple[float, float]:
        """How probably this request misses its first token here and there, as far as it has its gap to lose."""
        left_s = self._left_s(ask)
        fits = self._held_tokens + self._away_tokens() + ask.prompt_tokens <= self._max_kv_tokens
        at_stake = 1.0 if self._targets.itl_s is None else 1.0 - gap_above(gap_s, self._targets.itl_s)
        here = misses_first_token(local_s, left_s, self._risks["local"]) if fits or left_s is None else 1.0
        return at_stake * here, at_stake * misses_first_token(remote_s, left_s, self._risks["remote"])

    def _harmed(self, ask: Ask, now_s: float, here: Here, gap_s: float) -> float:
        """How many others miss a target because this prompt is computed here (expected). These are running streams,
        streams that will run when its turn comes, and requests whose KV comes just then."""
        streams = harm(
            self._streams(),
            now_s,
            before_s=here.before_s,
            more_s=here.pause_s,
            itl_s=gap_s,
            target_s=self._targets.itl_s,
            lengths=self.lengths,
        )
        return streams + self._delayed(now_s, here) + self._interrupted(ask, now_s, here, gap_s)

    # --- estimates -----------------------------------------------------------------------------

    def _left_s(self, ask: Ask) -> float | None:
        """Until its first token has to come; None: there is no target."""
        return None if self._targets.ttft_s is None else self._targets.ttft_s - ask.waited_s

    def _streams(self) -> list[Stream]:
        return [Stream(each.generated, each.first_s) for each in self._running.values() if each.first_s is not None]

    def _delayed(self, now_s: float, here: Here) -> float:
        """How many of those whose KV comes from elsewhere miss their first token because this prompt is computed just
        when it comes (expected)."""
        if self._targets.ttft_s is None:
            return 0.0
        total, risk = 0.0, self._risks["remote"]
        for request in self._coming.values():
            if request.promised is None:
                continue
            comes_s = max(0.0, request.promised.at_s + request.promised.estimated_s - now_s)
            delay_s = min(here.pause_s, here.before_s + here.pause_s - comes_s)
            if delay_s > 0:
                left_s = request.began_s + self._targets.ttft_s - now_s
                late, now = (misses_first_token(each, left_s, risk) for each in (comes_s + delay_s, comes_s))
                total += late - now
        return total

    def _interrupted(self, ask: Ask, now_s: float, here: Here, itl_s: float) -> float:
        """How many of those that have no token yet, but will when this prompt's turn comes, miss their gap by its
        pause (expected). A prompt that is computed in one pass with it has its first token no sooner."""
        if self._targets.itl_s is None:
            return 0.0
        left = self._pass_tokens - len(self._running) - (ask.prompt_tokens - ask.cached_tokens)
        count = len(self._prompts)
        for request in reversed(self._prompts.values()):
            left -= request.local_tokens or 0
            if left < 0 or (count == 1 and now_s > self._head_since_s):  # the first is being computed already
                break
            count -= 1
        for request in self._coming.values():
            promised = request.promised
            count += promised is not None and promised.at_s + promised.estimated_s < now_s + here.before_s
        if not count:
            return 0.0
        return count * misses_gap(Stream(1, now_s), now_s, here.pause_s, itl_s, self._targets.itl_s, self.lengths)

    def _away_tokens(self) -> int:
        return sum(each.prompt_tokens for each in self._away.values())

    def _local(self, ask: Ask, now_s: float) -> Here:
        factor, timing = self.local_correction.factor, self._timing
        before_s = self._before_s(now_s)
        uncached = ask.prompt_tokens - ask.cached_tokens
        own_s = timing.prefill_s(ask.prompt_tokens, ask.cached_tokens)
        tokens = uncached + sum(each.local_tokens or 0 for each in self._prompts.values())
        left = max(1, self._pass_tokens - len(self._running))
        passes = math.ceil(tokens / left) + (0.5 if self._running else 0.0)
        decoding_s = self.itl_s() * passes if self._running else 0.0
        return Here((before_s + own_s) * factor + decoding_s, before_s * factor, own_s * factor)

    def _before_s(self, now_s: float) -> float:
        """The uncorrected rest of the work on the prompts that are here."""
        works_s = [self._timing.prefill_s(each.prompt_tokens, each.cached_tokens) for each in self._prompts.values()]
        before_s = math.fsum(works_s)
        if works_s:  # the first of them has been computed for a while
            before_s -= min(works_s[0], max(0.0, now_s - self._head_since_s))
        return before_s

    def _paused_itl_s(self, now_s: float) -> float:
        """A token's time, with the pauses that prompts bring as often as they did lately."""
        return self.itl_s() / (1.0 - min(PAUSED_MAX, self._paused.value(now_s)))

    def _takeover_s(self) -> float:
        """From the end of a remote prefill to the first token here, where no prompt is before it."""
        seen = self._handover_s.value
        return 1.5 * self.itl_s() if seen is None else seen

    def _prefilled_s(self, work_s: float, queue: QueueView, workers: int) -> float:
        """Until it would be prefilled elsewhere."""
        own = len(self._away)
        outstanding = max(queue.outstanding, queue.pending, own)
        mean_s = self._work_s.value or work_s
        wait_s = 0.0
        if outstanding:
            own_s = math.fsum(each.away_work_s or 0.0 for each in self._away.values())
            each_s = (own_s + (outstanding - own) * mean_s) / outstanding
            computing = outstanding - queue.pending
            # One late entry comes before this one at every so many turns.
            first = queue.pending - queue.late
            wait_s = (first + min(queue.late, first / (LATE_EVERY - 1))) * each_s / workers
            if computing >= workers:
                wait_s += each_s / (workers + 1)
        return (wait_s + work_s) * self.remote_correction.factor
