"""The verdict as figures, and as a table for the docs."""

from __future__ import annotations

from benchmarks.drain.facts import OURS, Facts
from benchmarks.drain.judge import MANY, WINDOW_S, Verdict, judge
from benchmarks.harness import Report, at_least, at_most, percentile

OUT_OF_ROUTING_TARGET_MS = 50.0
ANSWER_TARGET_MS = 50.0
OVER_TARGET_MS = 20.0
ENOUGH_DOWNS = 200
"""From which on the share of hard drains says something; the short form has shorter answers, too."""


def report(facts: Facts) -> Report:
    """Figures with their targets. RuntimeError where something of ours was lost: that is no matter of degree."""
    verdict = judge(facts)
    if not verdict.ok or facts.unasked:
        raise RuntimeError("\n".join(complaints(verdict, facts)))
    found = Report("drain")
    row = verdict.rows[OURS]
    ups = [up for up in facts.ups if up.with_policy == OURS]
    found.add("scale-downs, drained", "", [row.downs])
    found.add("of these taken back by a scale-up", "", [sum(down.taken_back_s is not None for down in verdict.ours)])
    found.add("scale-ups", "", [len(ups)])
    found.add("requests", "", [verdict.requests])
    found.add("dropped requests", "", [row.cut], at_most(0))
    found.add("wrong answers", "", [row.wrong], at_most(0))
    late = f"sent to a worker more than {WINDOW_S * 1e3:.0f} ms after it deregistered"
    found.add(late, "", [len(verdict.too_late)], at_most(0))
    found.add("sent within that window, and served there", "", [verdict.late_served])
    found.add("sent within that window, and sent on", "", [verdict.late_sent_on])
    share = 100 * verdict.hard / row.downs
    name = f"drains that began with {MANY} or more streams that outlast 30 s"
    found.add(name, "%", [share], at_least(50) if row.downs >= ENOUGH_DOWNS else None)
    for name, portion in (("p50", 0.5), ("p99", 0.99)):
        target = at_most(OUT_OF_ROUTING_TARGET_MS) if portion == 0.99 else None
        milliseconds = percentile(verdict.out_of_routing_s, portion) * 1e3
        found.add(f"command to out of routing, {name}", "ms", [milliseconds], target)
    found.add("drain, from command to gone", "s", verdict.drain_s)
    for command in ("status", "scale"):
        took_s = [one.took_s for one in facts.asked if one.command == command and one.draining >= 2]
        name = f"`{command}` is answered while two or more drain, p99"
        found.add(name, "ms", [percentile(took_s, 0.99) * 1e3], at_most(ANSWER_TARGET_MS))
    found.add(
        "crash to the next process, beyond the back-off", "ms", [s * 1e3 for s in facts.over_s], at_most(OVER_TARGET_MS)
    )
    for other in verdict.rows.values():
        if other.policy.name != OURS and other.downs:
            found.add(f"{other.policy.name}: scale-downs", "", [other.downs])
            found.add(f"{other.policy.name}: dropped per scale-down", "", [other.cut / other.downs])
    late_s = [record.late_s for record in facts.records]
    found.notes.append(f"engines and budgets {facts.speed:g} times as fast; {facts.lasted_s:.0f} s")
    found.notes.append(f"{facts.trace}; benchmarks/traces.py says where a recorded hour is looked for")
    found.notes.append(f"the client sent 99 % of its requests within {percentile(late_s, 0.99) * 1e3:.1f} ms of due")
    return found


def complaints(verdict: Verdict, facts: Facts) -> list[str]:
    """All that went wrong, in words."""
    lines = [f"request {record.number}: {record.outcome}, {record.why}" for record in verdict.strays]
    lines += [
        f"request {sent.request_id} was sent {sent.component}:{sent.lease:x} too late" for sent in verdict.too_late
    ]
    return [*lines[:20], *facts.unasked[:20]]
