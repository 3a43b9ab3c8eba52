"""The arbiter's own tasks die: each is started again, named in the status, counted, and does no harm meanwhile.

The fault comes from the test's graph, which the arbiter imports: while there is a file beside it, what the task calls
raises as a bug would. Before, such a death was logged and nothing else: without samples all workers looked silent,
and without the registry nobody was ever seen to come or go.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.scaled import command, events, kinds
from tests.drivers.served import Served, until
from tests.integration.faults.conftest import ECHO

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

PATIENCE_S = 40.0
BUGS = """\
from pathlib import Path

from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.load import LoadSampler

HERE = Path(__file__).parent
sample, watch_prefix = LoadSampler.sample, EtcdStore.watch_prefix


def bug(name):
    if (HERE / name).exists():
        raise RuntimeError(f"a bug in {name}")


async def sampled(self, *args, **kwargs):
    bug("sampling")
    return await sample(self, *args, **kwargs)


async def watched(self, prefix, *args):
    async for event in watch_prefix(self, prefix, *args):
        if prefix.endswith("/workers/"):
            bug("watching")
        yield event


LoadSampler.sample, EtcdStore.watch_prefix = sampled, watched
"""


@pytest.fixture
def served() -> Iterator[Served]:
    """Two workers that may be silent for three seconds, and an arbiter that has bugs when there is a file of a name."""
    words = ("--gpus", "sim:8", "--Echo.ServiceArgs.workers=2", "--Host.health-bound-s=3")
    with Served(*words, target=("echo:Echo",), files={"echo.py": BUGS + ECHO}, frontend=False) as served:
        yield served.start()


def _task(served: Served, name: str) -> dict[str, Any]:
    tasks: list[dict[str, Any]] = served.status()["tasks"]
    return next(task for task in tasks if task["task"] == name)


def _counted(served: Served, name: str) -> float:
    with urllib.request.urlopen(served.status()["metrics_url"], timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    return next(
        float(line.split()[-1])
        for line in lines
        if "_task_deaths" in line and f'task="{name}"' in line and line[0] != "#"
    )


def test_sampling_that_dies_is_started_again_and_no_worker_is_held_to_be_silent(served: Served) -> None:
    bug, pids = Path(served.cwd, "sampling"), served.pids()
    assert _task(served, "load sampling")["deaths"] == 0
    bug.touch()
    until(lambda: served.status()["tasks"] and _task(served, "load sampling")["deaths"] >= 4, PATIENCE_S)
    dead = until(lambda: not (task := _task(served, "load sampling"))["running"] and task, PATIENCE_S)
    bug.unlink()
    until(lambda: _task(served, "load sampling")["running"], PATIENCE_S)
    until(lambda: all(row["load"] for row in served.status()["workers"]), PATIENCE_S, what=served.status)
    assert dead["why"] == "RuntimeError: a bug in sampling"
    assert dead["again_s"] is not None
    assert _counted(served, "load sampling") >= 4
    assert served.pids() == pids
    assert "HealthFailed" not in kinds(events(served))


@pytest.mark.full
def test_a_registry_watch_that_dies_is_started_again_and_sees_who_came_meanwhile(served: Served) -> None:
    bug, pids = Path(served.cwd, "watching"), served.pids()
    bug.touch()
    command(served, "scale", component="Echo", target="+1")
    dead = until(lambda: (task := _task(served, "registry watch"))["deaths"] >= 2 and task, PATIENCE_S)
    assert served.states()["Echo_2"] == "starting", "nobody has seen it come"
    bug.unlink()
    until(lambda: served.states()["Echo_2"] == "ready", PATIENCE_S, what=served.status)
    until(lambda: _task(served, "registry watch")["running"], PATIENCE_S)
    assert dead["deaths"] >= 2
    assert _counted(served, "registry watch") >= 2
    assert {name: served.pids()[name] for name in pids} == pids
