"""From the facts of a run to its verdict. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.drain.client import Record
from benchmarks.drain.facts import LONGEST_BUDGET_S, OURS, POLICIES, Down, Facts, Policy, Sent

WINDOW_S = 0.050
"""How long after it deregistered a worker may still be sent requests (which are served, or sent on)."""
MANY = 4
"""Streams that outlast every budget, from which on a drain counts as a hard one."""


@dataclass(slots=True)
class Row:
    """One policy's line. `in_flight` are streams on the victims when they were asked, `cut` those that broke."""

    policy: Policy
    downs: int = 0
    in_flight: int = 0
    cut: int = 0
    wrong: int = 0
    would_cut: int = 0
    """Streams in flight when *our* drains began that lasted longer than this policy's budget."""


@dataclass(slots=True)
class Verdict:
    """`rows` by policy name. `strays` are requests that failed with no policy of others' to blame: ours."""

    rows: dict[str, Row]
    requests: int
    strays: list[Record]
    late_served: int = 0
    late_sent_on: int = 0
    too_late: list[Sent] = field(default_factory=list)
    latest_s: float = 0.0
    hard: int = 0
    ours: list[Down] = field(default_factory=list)
    out_of_routing_s: list[float] = field(default_factory=list)
    drain_s: list[float] = field(default_factory=list)
    remaining_s: list[float] = field(default_factory=list)
    """How long each stream that was in flight when one of our drains began went on."""

    @property
    def ok(self) -> bool:
        """Nothing of ours was dropped, wrong or sent too late."""
        row = self.rows[OURS]
        return not (row.cut or row.wrong or self.strays or self.too_late)


class _Streams:
    """The holders of each stream over time: from the senders' notes and the client's records."""

    def __init__(self, facts: Facts) -> None:
        self._records = {record.request_id: record for record in facts.records if record.request_id}
        self._of_lease: dict[int, list[tuple[float, Record]]] = defaultdict(list)
        self.last_lease: dict[tuple[str, str], int] = {}
        for sent in sorted(facts.sent, key=lambda sent: sent.at_s):
            if sent.outcome == "taken":
                self.last_lease[sent.component, sent.request_id] = sent.lease
                if (record := self._records.get(sent.request_id)) is not None:
                    self._of_lease[sent.lease].append((sent.at_s, record))

    def on(self, lease: int, at_s: float) -> list[Record]:
        """Those that the worker of that lease held at that time."""
        return [record for sent_s, record in self._of_lease[lease] if sent_s <= at_s < record.ended_s]


def judge(facts: Facts) -> Verdict:
    """The whole verdict."""
    streams = _Streams(facts)
    rows = {policy.name: Row(policy) for policy in POLICIES}
    ours = [down for down in facts.downs if down.policy == OURS]
    verdict = Verdict(rows, len(facts.records), [], ours=ours)
    for down in facts.downs:
        held = streams.on(down.lease, down.asked_s)
        rows[down.policy].downs += 1
        rows[down.policy].in_flight += len(held)
        if down.policy == OURS:
            _count_ours(verdict, down, held, facts.speed)
    _blame(verdict, facts, streams)
    _count_late(verdict, facts.sent, ours)
    return verdict


def _count_ours(verdict: Verdict, down: Down, held: Sequence[Record], speed: float) -> None:
    lasted_s = [record.ended_s - down.asked_s for record in held]
    verdict.remaining_s += lasted_s
    for row in verdict.rows.values():
        if row.policy.budget_s is not None:
            row.would_cut += sum(seconds > row.policy.budget_s / speed for seconds in lasted_s)
    verdict.hard += sum(seconds > LONGEST_BUDGET_S / speed for seconds in lasted_s) >= MANY
    if down.deregistered_s is not None:
        verdict.out_of_routing_s.append(down.deregistered_s - down.asked_s)
    if down.gone_s is not None:
        verdict.drain_s.append(down.gone_s - down.asked_s)


def _blame(verdict: Verdict, facts: Facts, streams: _Streams) -> None:
    """Each failed request to the policy that killed the worker that had it; else it is ours."""
    killed = {down.lease: down for down in facts.downs if down.killed_s is not None}
    for record in facts.records:
        if record.outcome == "right":
            continue
        lease = streams.last_lease.get(("VllmWorker", record.request_id or ""), 0)
        down = killed.get(lease)
        if record.outcome == "cut" and down is not None:
            verdict.rows[down.policy].cut += 1
        else:
            verdict.strays.append(record)
    ours = verdict.rows[OURS]
    outcomes = Counter(record.outcome for record in verdict.strays)
    ours.wrong = outcomes["wrong"]
    ours.cut = len(verdict.strays) - ours.wrong


def _count_late(verdict: Verdict, sent: Iterable[Sent], ours: Sequence[Down]) -> None:
    """Requests that were sent to a worker of ours after it had deregistered."""
    left = {down.lease: down.deregistered_s for down in ours if down.deregistered_s is not None}
    for one in sent:
        deregistered_s = left.get(one.lease)
        if deregistered_s is None or one.at_s <= deregistered_s:
            continue
        late_s = one.at_s - deregistered_s
        verdict.latest_s = max(verdict.latest_s, late_s)
        if late_s > WINDOW_S:
            verdict.too_late.append(one)
        elif one.outcome == "taken":
            verdict.late_served += 1
        else:
            verdict.late_sent_on += 1
