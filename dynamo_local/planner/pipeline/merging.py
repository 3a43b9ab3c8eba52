"""One target for each role out of the proposals of several plugins: PROPOSE, RECONCILE and CONSTRAIN.

Of the plugins of one stage, in this order:

1. A `Reject` ends the tick: nothing is changed.
2. Of the overrides that are `final` the one with the smallest priority is heard alone. (Not in CONSTRAIN.)
3. For each role: `max(all AT_LEAST, min(all AT_MOST, the SET with the smallest priority))`. Where there is no SET (none
   counts in CONSTRAIN), the role's number after the stage before takes its place.

A final override is merged by the third rule as any other: an AT_MOST in it stays a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.planner.values.proposals import ComponentTarget, Override, OverrideType, Proposal, Reject


@dataclass(frozen=True, slots=True)
class Clamp:
    """A bound that changed something: the role would have had `wanted` replicas, and has `replicas` by the word of
    `source`."""

    sub_component_type: str
    source: str
    wanted: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Merged:
    """`targets` are those of all stages up to this one, each a SET, of the roles that anybody wants changed.

    `rejected` is the proposal that ended the tick, `final` the one that was heard alone. `dropped` are targets that do
    not count, as `(plugin_id, sub_component_type)`: a SET in CONSTRAIN, or a role that this graph does not have.
    """

    targets: tuple[ComponentTarget, ...] = ()
    rejected: Proposal | None = None
    final: Proposal | None = None
    clamps: tuple[Clamp, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


def merge(
    proposals: Iterable[Proposal],
    baseline: Mapping[str, int],
    so_far: Sequence[ComponentTarget] = (),
    *,
    bounds_only: bool = False,
) -> Merged:
    """One stage. `baseline` has the workers of each role of the graph, `so_far` the targets of the stage before.

    A role of which nobody spoke, or only a bound that the number keeps anyway, is in the targets only if it was in
    `so_far`: who says "at most 8" of two workers wants nothing done. `bounds_only`: CONSTRAIN.
    """
    ordered = sorted(proposals, key=lambda proposal: (proposal.priority, proposal.plugin_id))
    for proposal in ordered:
        if isinstance(proposal.result, Reject):
            return Merged(rejected=proposal)
    heard = [(proposal, proposal.result) for proposal in ordered if isinstance(proposal.result, Override)]
    final = None if bounds_only else next((each for each in heard if each[1].final), None)
    if final is not None:
        heard = [final]
    said: dict[str, list[tuple[str, ComponentTarget]]] = {}
    dropped = []
    for proposal, override in heard:
        for target in override.targets:
            role = target.sub_component_type
            if role not in baseline or (bounds_only and target.type is OverrideType.SET):
                dropped.append((proposal.plugin_id, role))
            else:
                said.setdefault(role, []).append((proposal.plugin_id, target))
    numbers = {target.sub_component_type: target.replicas for target in so_far}
    clamps = []
    for role, targets in said.items():
        before = numbers.get(role, baseline[role])
        number, clamp = _decided(role, targets, before)
        if clamp is not None:
            clamps.append(clamp)
        if role in numbers or number != before or any(target.type is OverrideType.SET for _, target in targets):
            numbers[role] = number
    return Merged(
        targets=tuple(ComponentTarget(role, numbers[role]) for role in baseline if role in numbers),
        final=None if final is None else final[0],
        clamps=tuple(clamps),
        dropped=tuple(dropped),
    )


def _decided(role: str, said: Sequence[tuple[str, ComponentTarget]], before: int) -> tuple[int, Clamp | None]:
    """The role's number, and the bound that made it so. `said` is in the order of priorities."""
    sets = [target.replicas for _, target in said if target.type is OverrideType.SET]
    ceilings = [(target.replicas, source) for source, target in said if target.type is OverrideType.AT_MOST]
    floors = [(target.replicas, source) for source, target in said if target.type is OverrideType.AT_LEAST]
    wanted = number = sets[0] if sets else before
    source = None
    if ceilings and (lowest := min(ceilings))[0] < number:
        number, source = lowest
    if floors and (highest := max(floors))[0] > number:
        number, source = highest
    if source is None or number == wanted:
        return number, None
    return number, Clamp(role, source, wanted, number)
