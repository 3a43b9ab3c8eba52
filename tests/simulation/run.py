"""One seed, from its first random number to the end of its run."""

from __future__ import annotations

import asyncio
import random

from tests.simulation.actions import ACTIONS, GENTLE
from tests.simulation.scenario import RunOutcome, Scenario
from tests.simulation.world import SimLoop


def run_seed(
    seed: int,
    *,
    crash_at: int | None = None,
    crash_when: str = "before",
    steps: int | None = None,
    adopts: bool = False,
    gentle: bool = False,
    spares: int = 0,
) -> RunOutcome:
    """One whole run. Raises `Broken` whose notes are the story. `adopts`: what comes after a crash; `gentle`: commands
    alone, none of them forced; `spares`: so many are kept, and fare badly."""
    rng = random.Random(seed)
    made: list[Scenario] = []
    with asyncio.Runner(loop_factory=lambda: SimLoop(rng)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)

        async def main() -> None:
            scenario = Scenario(rng, loop, GENTLE if gentle else ACTIONS, adopts=adopts, gentle=gentle, spares=spares)
            made.append(scenario)
            try:
                await scenario.run(crash_at=crash_at, crash_when=crash_when, steps=steps)
            finally:
                for process in scenario.world.living():
                    process.die()
                scenario.arbiter.died()
                if scenario.watching is not None:
                    scenario.watching.cancel()
                await asyncio.sleep(0)

        try:
            runner.run(main())
        except BaseException as error:
            for line in made[0].world.story if made else ():
                error.add_note(line)
            raise
    scenario = made[0]
    return RunOutcome(scenario.world.story, scenario.arbiter.writes, scenario.commands)
