"""A graph of which a part does not serve is *degraded*, never ready: this says which part."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_local.core.fleet.fleet import Fleet

READY, DEGRADED = "ready", "degraded"


class Lack(NamedTuple):
    """One thing that a component lacks, in words."""

    component: str
    what: str


def lacking(fleet: Fleet) -> tuple[Lack, ...]:
    """Empty where nothing is missing.

    A component lacks something if it has workers and none of these serves. A model that may have no worker lacks
    something only while one is on its way in vain. So it does if workers left because
    somebody else revoked their lease, until a command decides anew how many workers there are.
    """
    found = []
    for template in fleet.templates:
        component, workers = template.component, fleet.of(template.component)
        rests = template.may_be_none and not any(worker.counts for worker in workers)
        if workers and not rests and not any(worker.ready for worker in workers):
            states = ", ".join(f"{worker.name} is {worker.state}" for worker in workers)
            found.append(Lack(component, f"{component}: no worker serves ({states})"))
        gone = [name for name, of in fleet.revoked.items() if of == component]
        if gone:
            what = f"{component}: {', '.join(gone)} left, because somebody else revoked the lease"
            found.append(Lack(component, f"{what}; `dynamo scale {component} +{len(gone)}` replaces what is gone"))
    return tuple(found)


def shown_state(state: str, fleet: Fleet) -> str:
    """A run's own state (starting, adopting, ready, leaving) as people are told it."""
    return DEGRADED if state == READY and lacking(fleet) else state
