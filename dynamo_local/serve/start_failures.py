"""How a start can fail, and who is to blame."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.control.deployment import WatcherFactory
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import DynamoError


class InterruptedStart(DynamoError):
    """Somebody asked us to leave while we were starting: no failure of the graph."""

    code = "interrupted"
    exit_code = 130


def too_late(worker: Worker, fleet: Fleet, factory: WatcherFactory, told: Mapping[str, str]) -> str:
    """Who was late, and the log of the worker that it waited for: one that waits for another has nothing to say.

    `told` has what starting workers wait for, as they said.
    """
    culprit = waited_for(worker, fleet, factory.graph)
    waits = "" if culprit is worker else f": it waits for {culprit.name}"
    if culprit.name in told:
        waits += f", which waits for {told[culprit.name]}" if waits else f": it waits for {told[culprit.name]}"
    return f"{worker.name} {worker.reason}{waits}; {factory.log_tail_of(culprit)}"


def waited_for(worker: Worker, fleet: Fleet, graph: GraphSpec) -> Worker:
    """Of a worker that is not ready: whom it waits for in the end; itself where it waits for nobody."""
    workers = list(fleet.workers.values())
    ready = {other.component for other in workers if other.ready}
    culprit = worker
    while waited := set(graph.service(culprit.component).depends) - ready:
        culprit = next((other for other in workers if other.component in waited), culprit)
        ready |= waited  # each is looked at once, also where two wait for each other
    return culprit
