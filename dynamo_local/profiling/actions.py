"""How long a graph's own actions take on this host: each is carried out once, by the arbiter, which times it itself.

Cold starts were timed when the graph came up. One more worker and one less of each component tell of spares and drains;
flips and sleeps are tried where the configuration has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dynamo_local.profiling.graph import GraphFailed, MeasuredGraph, dynamo

TIMEOUT_S = 600.0


async def measured_actions(graph: MeasuredGraph, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Seconds, by component and by what was done. What is refused (no free GPU) is told, and left out."""
    drains: dict[str, float] = {}
    for component in dict.fromkeys(graph.target.components.values()):
        await _one_more_and_one_less(graph, component, drains, tell)
        await _flip(graph, component, tell)
        await _sleep(graph, component, tell)
    found: dict[str, dict[str, float]] = {}
    for row in (await graph.look())["lead_times"]:
        if row["component"] in graph.target.components.values() and row["run"] is not None:
            found.setdefault(row["component"], {})[row["rung"]] = row["run"]["median_s"]
    for component, seconds in drains.items():
        found.setdefault(component, {})["drain"] = round(seconds, 4)
    return found


async def _one_more_and_one_less(
    graph: MeasuredGraph, component: str, drains: dict[str, float], tell: Callable[[str], None]
) -> None:
    if await _tried(graph, tell, "scale", component, "+1", "--wait"):
        began_s = time.monotonic()
        if await _tried(graph, tell, "scale", component, "-1", "--wait"):
            drains[component] = time.monotonic() - began_s


async def _flip(graph: MeasuredGraph, component: str, tell: Callable[[str], None]) -> None:
    """There and back."""
    service = next(each for each in graph.target.spec.services if each.name == component)
    if service.flips_to is None or service.flips_to not in graph.target.components.values():
        return
    name = _short(graph, component)
    if name is not None and await _tried(graph, tell, "flip", name, "--force", "--wait"):
        await graph.look()
        flipped = _short(graph, service.flips_to, last=True)
        if flipped is not None:
            await _tried(graph, tell, "flip", flipped, "--force", "--wait")


async def _sleep(graph: MeasuredGraph, component: str, tell: Callable[[str], None]) -> None:
    service = next(each for each in graph.target.spec.services if each.name == component)
    if service.standby is None:
        return
    await graph.look()
    name = _short(graph, component)
    if name is not None and await _tried(graph, tell, "sleep", name, "--force", "--wait"):
        await _tried(graph, tell, "wake", name, "--wait")


def _short(graph: MeasuredGraph, component: str, *, last: bool = False) -> str | None:
    """A worker's name without the namespace."""
    names = [worker.name.removeprefix(f"{graph.target.namespace}_") for worker in graph.workers(component)]
    return names[-1 if last else 0] if names else None


async def _tried(graph: MeasuredGraph, tell: Callable[[str], None], *words: Any) -> bool:
    tell(f"timing: dynamo {' '.join(words[:3])}")
    try:
        await dynamo(*words, "--namespace", graph.target.namespace, timeout_s=TIMEOUT_S)
    except GraphFailed as error:
        tell(f"not timed: {error}")
        return False
    return True
