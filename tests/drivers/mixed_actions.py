"""Actions on a running graph in random order from a seed, under load: none of them may cost a request.

`ACTIONS` is a table: a way to change the graph is a row. `python -m tests.drivers.mixed_actions --seed 7`
runs 200 of them under 2,000 requests on real processes, and says what happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.errors import DynamoError
from tests.drivers.scaled import PATIENCE_S, Load, command, events, load, names, settled
from tests.drivers.served import DISAGG, Served, auntil

COMPONENTS = {"VllmWorker": 3, "PrefillWorker": 2}
"""Those that are changed, each with its most workers: two cores run six processes that import at most."""
WORDS = (
    "--Host.spares=1",
    "--Common.sim.speed=10",
    *(f"--{component}.ServiceArgs.standby=0" for component in COMPONENTS),  # each may be put to sleep by hand
)
PLANNED = (
    "--planner",
    "--Planner.policy=load",
    "--Planner.adjustment-interval=3",
    "--Planner.metric-pulling-interval=0.5",
    "--Planner.min-gpu-budget=2",
)
"""A planner beside a person: it wants another number of workers than the last command."""
COMING = ("ready", "starting", "pending", "flipping", "waking")
CLIENTS = 8


@dataclass(slots=True)
class Mixed:
    """One run: the graph, its dice, and what was done and refused."""

    served: Served
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)

    async def order(self, name: str, /, **properties: Any) -> dict[str, Any]:
        """A command over the control endpoint. Raises what the arbiter refuses it with."""
        return await asyncio.to_thread(command, self.served, name, **properties)

    async def component(self) -> str:
        return self.rng.choice(list(COMPONENTS))

    async def worker(self) -> str | None:
        """A ready worker's watcher name; None where its component has no other."""
        component = await self.component()
        ready = await asyncio.to_thread(names, self.served, component)
        return f"{self.served.namespace}_{self.rng.choice(ready)}" if len(ready) > 1 else None


Action = Callable[[Mixed], Awaitable[bool]]
"""False: there was nothing to do it to."""


async def scale_up(mixed: Mixed) -> bool:
    """One more worker, of a spare where one is warm."""
    component = await mixed.component()
    rows = (await asyncio.to_thread(mixed.served.status))["workers"]
    there = sum(row["component"] == component and row["state"] in COMING for row in rows)
    if there >= COMPONENTS[component]:
        return False
    await mixed.order("scale", component=component, target="+1")
    return True


async def scale_down(mixed: Mixed) -> bool:
    component = await mixed.component()
    if len(await asyncio.to_thread(names, mixed.served, component)) < 2:
        return False
    await mixed.order("scale", component=component, target="-1")
    return True


async def drain(mixed: Mixed) -> bool:
    name = await mixed.worker()
    if name is not None:
        await mixed.order("drain", name=name)
    return name is not None


async def drain_and_cancel(mixed: Mixed) -> bool:
    name = await mixed.worker()
    if name is None:
        return False
    await mixed.order("drain", name=name)
    await mixed.order("drain", name=name, cancel=True)
    return True


async def restart(mixed: Mixed) -> bool:
    """One worker drains, and comes back under its name, of a spare where one is warm."""
    name = await mixed.worker()
    if name is not None:
        await mixed.order("restart", name=name, rolling=False)
    return name is not None


async def rolling_restart(mixed: Mixed) -> bool:
    component = await mixed.component()
    await mixed.order("restart", name=component, rolling=True)
    return True


async def kill_spare(mixed: Mixed) -> bool:
    told = (await asyncio.to_thread(mixed.served.status))["spares"]
    pids = [spare["pid"] for spare in told["spares"] if spare["state"] == "warm" and spare["pid"]]
    if not pids:
        return False
    os.kill(mixed.rng.choice(pids), signal.SIGKILL)
    return True


async def flip(mixed: Mixed) -> bool:
    name = await mixed.worker()
    if name is not None:
        await mixed.order("flip", name=name)
    return name is not None


async def flip_and_cancel(mixed: Mixed) -> bool:
    """One is told to, and called back; that may come too late, and is refused then."""
    name = await mixed.worker()
    if name is None:
        return False
    await mixed.order("flip", name=name)
    await mixed.order("flip", name=name, cancel=True)
    return True


async def scale_flip(mixed: Mixed) -> bool:
    gives = await mixed.component()
    takes = next(component for component in COMPONENTS if component != gives)
    if len(await asyncio.to_thread(names, mixed.served, gives)) < 2:
        return False
    await mixed.order("scale_flip", gives=gives, takes=takes, count=1)
    return True


async def sleep(mixed: Mixed) -> bool:
    name = await mixed.worker()
    if name is not None:
        await mixed.order("sleep", name=name, level=mixed.rng.choice((1, 1, 1, 2)))
    return name is not None


async def wake(mixed: Mixed) -> bool:
    asleep = await sleepers(mixed.served)
    if not asleep:
        return False
    await mixed.order("wake", name=mixed.rng.choice(asleep))
    return True


async def sleepers(served: Served) -> list[str]:
    rows = (await asyncio.to_thread(served.status))["workers"]
    return [row["watcher_name"] for row in rows if row["state"] in ("sleeping", "falling_asleep")]


ACTIONS: dict[str, tuple[int, Action]] = {
    "scale up": (6, scale_up),
    "scale down": (4, scale_down),
    "drain": (2, drain),
    "drain and cancel": (3, drain_and_cancel),
    "restart": (3, restart),
    "rolling restart": (1, rolling_restart),
    "kill a spare": (1, kill_spare),
    "flip": (5, flip),
    "flip and cancel": (2, flip_and_cancel),
    "scale with a flip": (2, scale_flip),
    "sleep": (4, sleep),
    "wake": (4, wake),
}
"""Name -> how often it comes, and what it does."""


async def all_up(served: Served) -> None:
    """Nothing is under way any more, and nobody sleeps: who cannot have its GPU back leaves."""
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while asleep := await sleepers(served):
        if asyncio.get_running_loop().time() > deadline_s:
            raise TimeoutError(f"these sleep on: {asleep}")
        for name in asleep:
            try:
                await asyncio.to_thread(command, served, "wake", name=name)
            except DynamoError:  # somebody holds its GPU, or there would be too many of it
                await asyncio.to_thread(command, served, "drain", name=name)
        await asyncio.sleep(0.2)  # orders take a moment to be seen
    await settled(served, PATIENCE_S)


async def run(served: Served, *, seed: int, actions: int, requests: int) -> tuple[Mixed, Load]:
    """So many actions, and at least so many requests beside them; returns when all is settled. The graph is ready.

    An action that the arbiter refuses (the last worker, a drain that has ended) counts: nothing was dropped by it.
    """
    mixed = Mixed(served, random.Random(seed))
    choices, weights = list(ACTIONS), [weight for weight, _ in ACTIONS.values()]
    async with load(served, CLIENTS) as found:
        while mixed.done.total() + mixed.refused.total() < actions and not found.failures:
            name = mixed.rng.choices(choices, weights)[0]
            try:
                happened = await ACTIONS[name][1](mixed)
            except DynamoError as refusal:
                mixed.refused[name] += 1
                mixed.story.append(f"{time.time():.2f} {name}: refused, {refusal}")
            else:
                if happened:
                    mixed.done[name] += 1
                    mixed.story.append(f"{time.time():.2f} {name}")
            await found.more(mixed.rng.choice((0, 1, 2, 4, 8, 16)))
        await auntil(lambda: found.failures or found.right >= requests, PATIENCE_S * 10, what=lambda: found.right)
    if not found.failures:
        await all_up(served)
    return mixed, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actions", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--planner", action="store_true", help="a planner decides beside the actions")
    words = parser.parse_args()
    with Served(*WORDS, *(PLANNED if words.planner else ()), target=DISAGG).started() as served:
        mixed, found = asyncio.run(run(served, seed=words.seed, actions=words.actions, requests=words.requests))
        facts = served.status()["lead_times"]
        last = [
            f"{e['time']:.2f} {e['watcher_name']} {e['event']} {e['from']}->{e['to']}" for e in events(served)[-60:]
        ]
    print(
        json.dumps(
            {
                "seed": words.seed,
                "done": mixed.done,
                "refused": mixed.refused,
                "right": found.right,
                "dropped": found.failures,
                **({"story": mixed.story, "events": last} if found.failures else {}),
                "lead_times": facts,
            },
            indent=2,
        )
    )
    return 1 if found.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
