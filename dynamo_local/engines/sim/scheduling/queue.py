"""Requests that do not run: in order of arrival, preempted ones first, and those whose KV comes from another engine."""

from __future__ import annotations

from collections import deque

from dynamo_local.core.passes import Requests, Tally
from dynamo_local.engines.sim.scheduling.requests import Seq


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
        """What is queued, as `ForwardPass.queued`."""
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
