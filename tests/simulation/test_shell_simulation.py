"""The arbiter's shell under whatever a seed brings. Failing seeds are printed; those that once did are in `seeds.txt`.

`DYN_SIM_SEEDS=20000` runs more than the default, `DYN_SIM_FIRST=123456` others; one seed alone:
`python -c "from tests.simulation.run import run_seed; run_seed(123)"`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.run import run_seed

SEEDS = int(os.environ.get("DYN_SIM_SEEDS", "1000"))
FIRST = int(os.environ.get("DYN_SIM_FIRST", "10000"))
CHUNKS = 8
SHOWN = 5
GENTLE_SHARE = 20
"""One gentle run for so many others."""
SPARED_SHARE = 4
"""One run with spares for so many."""
GENTLY_FAILED = (128, 150, 230)
ONCE_FAILED = [int(line) for line in (Path(__file__).parent / "seeds.txt").read_text().split()]
CRASH_SEEDS = [(7, 0), *(pytest.param(*each, marks=pytest.mark.full) for each in ((7, 1), (3, 0), (36, 1)))]
"""With how many spares."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of simulated faults are thousands of warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _failures(seeds: list[int], *, spared: bool = False, **how: Any) -> list[str]:
    found = []
    for seed in seeds:
        spares = _spares(seed) if spared else 0
        try:
            run_seed(seed, spares=spares, **how)
        except AssertionError as error:
            story = "\n".join(getattr(error, "__notes__", ())[-40:])
            found.append(f"seed {seed} ({spares} spares): {error}\n{story}")
    return found


def _spares(seed: int) -> int:
    """Of a seed's run: mostly none."""
    return 1 + seed // SPARED_SHARE % 2 if seed % SPARED_SHARE == 0 else 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_breaks_and_all_comes_right_once_the_chaos_stops(chunk: int) -> None:
    found = _failures([FIRST + n for n in range(SEEDS) if n % CHUNKS == chunk], spared=True)

    assert found == [], f"{len(found)} seeds; add them to seeds.txt:\n" + "\n\n".join(found[:SHOWN])


@pytest.mark.timeout(600)
def test_somebody_always_serves_where_nothing_breaks_and_nothing_is_forced() -> None:
    """Commands alone, on processes and an etcd that take their time: in the registry, where clients look, no component
    is ever without an endpoint, whatever the arbiter takes for ready."""
    found = _failures([FIRST + n for n in range(SEEDS // GENTLE_SHARE)], spared=True, gentle=True, steps=30)

    assert found == [], f"{len(found)} seeds; add them to GENTLY_FAILED:\n" + "\n\n".join(found[:SHOWN])


def test_spares_become_workers_and_are_missed_by_nobody() -> None:
    """A run with spares really uses them, so that the other runs mean something. Always the same seeds: in eight seeds
    of somebody's choice (`DYN_SIM_FIRST`) it may happen three times only."""
    stories = [run_seed(seed, spares=2).story for seed in range(10_000, 10_016)]
    assert sum(" becomes dynamo_" in line for story in stories for line in story) > 3
    assert sum("a spare failed" in line for story in stories for line in story) > 3


@pytest.mark.parametrize("seed", GENTLY_FAILED)
def test_a_gentle_seed_that_once_failed(seed: int) -> None:
    assert _failures([seed], gentle=True, steps=30) == []


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_a_seed_that_once_failed(seed: int) -> None:
    assert _failures([seed]) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "spares"), CRASH_SEEDS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("adopts", [False, True], ids=["anew", "adopted"])
def test_an_arbiter_that_dies_at_any_commit_leaves_a_statefile_that_says_all(
    seed: int, spares: int, when: str, adopts: bool
) -> None:
    """`kill -9` before and after each write: each live process is in the file with pid and GPUs, nobody twice.

    Its successor ends all and starts anew; or it takes all over, and whoever the file wants serves in the end.
    """
    writes = run_seed(seed, steps=8, spares=spares).writes
    crashed = taken_over = 0
    for at in range(1, writes + 1):
        outcome = run_seed(seed, crash_at=at, crash_when=when, steps=8, adopts=adopts, spares=spares)
        crashed += any("the arbiter dies" in line for line in outcome.story)
        taken_over += any("another arbiter takes over" in line for line in outcome.story)

    assert crashed >= writes - 1  # what `dynamo down` writes at the very end may be one fewer
    assert adopts == (taken_over > writes // 2)
