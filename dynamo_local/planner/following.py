"""Following another planner's decisions: from its keys and our pools to the next steps. Pure.

The rules, in prose:

* Only a complete decision counts. Numbers that are younger than their id wait for the next id; the decision under way
  goes on with its own.
* A value that cannot be read changes nothing: no step, no acknowledgement.
* A newer decision replaces the one under way.
* A component goes to its number with one step, downs before ups: a GPU may change hands.
* A decision is acknowledged once each of its components has exactly its number of workers ready, none on its way and
  none leaving that can still be given a request. One that only finishes its streams delays only the use of its GPU.
* An acknowledged decision is done. From then on anybody may change the number of workers, until the next decision.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dynamo_local.core.virtual import NOT_SET, KeysState, PlannerDecision
from dynamo_local.planner.values import Pool, WorkerPools


class Phase(enum.StrEnum):
    """Where an environment stands."""

    WAITING = "waiting"
    """It waits for a first decision, or for the rest of one."""
    UNREADABLE = "unreadable"
    """A value is invalid; nothing is changed until it is valid."""
    UNDER_WAY = "under_way"
    REFUSED = "refused"
    """The decision cannot be carried out now. It is tried again."""
    DONE = "done"
    """Acknowledged, or to be acknowledged now."""


_KNOWN = frozenset({Phase.UNDER_WAY, Phase.REFUSED, Phase.DONE})
"""The decision was seen complete."""


@dataclass(frozen=True, slots=True)
class Next:
    """`steps` are `(component, wanted workers)` in the order in which they are to be taken. With `acknowledge` the
    decision is carried out, and must be acknowledged. `reason` is what it waits for, or why nothing can be done.
    """

    phase: Phase
    decision: PlannerDecision = PlannerDecision()  # noqa: RUF009 - frozen
    steps: tuple[tuple[str, int], ...] = ()
    acknowledge: bool = False
    reason: str | None = None


def next_step(reported: KeysState, pools: WorkerPools, last: Next | None = None) -> Next:
    """The next step. `last` is the previous result, or what became of it."""
    if reported.faults:
        return Next(Phase.UNREADABLE, reported.decision, reason="; ".join(reported.faults))
    decision = reported.decision
    if decision.decision_id == NOT_SET:
        return Next(Phase.WAITING, reason="no decision yet")
    known = last is not None and last.phase in _KNOWN and last.decision.decision_id == decision.decision_id
    if reported.half_written and known and last is not None:
        decision = last.decision
    if reported.acknowledged:
        return Next(Phase.DONE, decision, reason=_begun_anew(reported))
    if reported.half_written and not known:
        why = f"a number is younger than decision_id {decision.decision_id}, so the next id is waited for"
        return Next(Phase.WAITING, PlannerDecision(decision_id=decision.decision_id), reason=why)
    if pools.prefill is None and decision.num_prefill_workers > 0:
        why = f"num_prefill_workers is {decision.num_prefill_workers}, but the graph has no prefill component"
        return Next(Phase.REFUSED, decision, reason=why)
    wanted = _wanted(decision, pools)
    steps = sorted((target - pool.capacity, pool.component, target) for pool, target in wanted)
    missing = [_missing(pool, target) for pool, target in wanted if not _reached(pool, target)]
    return Next(
        Phase.UNDER_WAY if missing else Phase.DONE,
        decision,
        tuple((component, target) for delta, component, target in steps if delta),
        acknowledge=not missing,
        reason="; ".join(missing) or None,
    )


def _begun_anew(reported: KeysState) -> str | None:
    """The warning for a planner that lost its count: its decisions count as carried out before they are."""
    decided, scaled = reported.decision.decision_id, reported.scaled_decision_id
    if scaled == decided:
        return None
    return (
        f"scaled_decision_id is {scaled}, so all up to that count as carried out, and decision_id is only {decided}; "
        "if the planner began to count anew, delete scaled_decision_id"
    )


def _wanted(decision: PlannerDecision, pools: WorkerPools) -> list[tuple[Pool, int]]:
    """The components for which the decision has a number."""
    pairs = ((pools.prefill, decision.num_prefill_workers), (pools.decode, decision.num_decode_workers))
    return [(pool, number) for pool, number in pairs if pool is not None and number != NOT_SET]


def _reached(pool: Pool, target: int) -> bool:
    return pool.ready == target and pool.coming == 0 and pool.routed == 0


def _missing(pool: Pool, target: int) -> str:
    parts = (
        f"{pool.ready} of {target} ready",
        f"{pool.coming} on their way" if pool.coming else "",
        f"{pool.routed} not yet out of routing" if pool.routed else "",
    )
    return f"{pool.component}: {', '.join(part for part in parts if part)}"
