"""How long a graph's own actions take on this host: each is carried out once, by the arbiter, which times it itself.

Cold starts were timed when the graph came up. One more worker and one less of each component tell of spares and drains;
flips and sleeps are tried where the configuration has them. Beside it, what a worker holds in each state.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_local.errors import GpuError
from dynamo_local.measuring.graph import GraphFailed, MeasuredGraph, dynamo
from dynamo_local.measuring.host import gpu_bytes, host_bytes
from dynamo_local.profile.document import MemoryFacts
from dynamo_local.system.gpus import Inventory

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Acted:
    """Seconds, by component and by what was done; bytes, by component and state (`ready`, `asleep_1`, …)."""

    seconds: dict[str, dict[str, float]]
    memory: dict[str, dict[str, MemoryFacts]]


async def measured_actions(
    graph: MeasuredGraph, inventory: Inventory, tell: Callable[[str], None], until_s: float
) -> Acted:
    """Time each action once. A refused one (no free GPU) is reported and skipped.

    A start that would end after `until_s` (monotonic, s) is skipped, too.
    """
    cold_s, drains = graph.cold_s(), dict[str, float]()
    memory: dict[str, dict[str, MemoryFacts]] = {}
    for component in dict.fromkeys(graph.target.components.values()):
        try:
            memory[component] = await _memory(graph, component, inventory)
            takes_s, left_s = cold_s.get(component, 0.0), until_s - time.monotonic()
            if takes_s > left_s:
                left = f"{max(0.0, left_s):.0f} s of the budget are left"
                tell(f"not timed: one more {component} takes {takes_s:.0f} s, and {left}")
            else:
                await _one_more_and_one_less(graph, component, drains, tell)
            await _flip(graph, component, tell)
            memory[component] |= await _sleep(graph, component, tell)
        except GraphFailed as error:  # what was measured before is not lost for it
            tell(f"not timed: {component}: {error}")
    found: dict[str, dict[str, float]] = {}
    with contextlib.suppress(GraphFailed):  # then what it told last
        await graph.look()
    for row in graph.status["lead_times"]:
        if row["component"] in graph.target.components.values() and row["run"] is not None:
            found.setdefault(row["component"], {})[row["rung"]] = row["run"]["median_s"]
    for component, seconds in drains.items():
        found.setdefault(component, {})["drain"] = round(seconds, 4)
    return Acted(found, {component: states for component, states in memory.items() if states})


async def _memory(graph: MeasuredGraph, component: str, inventory: Inventory) -> dict[str, MemoryFacts]:
    """The first ready worker of a component."""
    await graph.look()
    ready = graph.workers(component)
    if not ready:
        return {}
    try:
        devices = await asyncio.to_thread(inventory.sample)
    except GpuError:
        devices = ()
    pid = graph.pid(ready[0])
    host = await asyncio.to_thread(host_bytes, pid)
    return {"ready": MemoryFacts(vram_bytes=gpu_bytes(pid, devices), host_bytes=host)}


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


async def _sleep(graph: MeasuredGraph, component: str, tell: Callable[[str], None]) -> dict[str, MemoryFacts]:
    """Sleep and wake at each level in turn. The arbiter has measured the memory that a sleeper keeps."""
    service = next(each for each in graph.target.spec.services if each.name == component)
    if service.standby is None:
        return {}
    found = {}
    for level in ("1", "2"):
        await graph.look()
        name = _short(graph, component)
        if name is None or not await _tried(graph, tell, "sleep", name, "--level", level, "--force", "--wait"):
            continue
        for each in (await graph.look())["workers"]:
            if each["watcher_name"].endswith(f"_{name}") and each["standby"] is not None:
                kept = each["standby"]
                facts = MemoryFacts(vram_bytes=kept["vram_bytes"], host_bytes=kept["host_bytes"])
                found[f"asleep_{kept['level'] or level}"] = facts
        await _tried(graph, tell, "wake", name, "--wait")
    return found


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
