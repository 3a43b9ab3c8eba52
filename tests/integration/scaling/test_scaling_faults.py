"""Workers that fail to start, crash, hang, or die with etcd and NATS: what follows, and who pays for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import ascale, events, kinds, settled
from tests.drivers.served import Served, auntil, until

pytestmark = pytest.mark.infra

FLAKY = """\
import asyncio, os, signal
from pathlib import Path
from dynamo_local.sdk import async_on_start, endpoint, service


@service(name="Flaky", resources={"gpu": 1})
class Flaky:
    @async_on_start
    async def start(self):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, os._exit, 0)
        print("I am", os.environ["DYN_WATCHER_NAME"], flush=True)
        if Path("hang").exists():
            await asyncio.Event().wait()
        if Path("break").exists():
            raise RuntimeError("I am broken by design")

    @endpoint()
    async def generate(self, request):
        yield request
"""
CONFIG = """\
Host:
  gpus: sim:4
  health-bound-s: 3
  restart: {first-s: 0.2, max-s: 0.4, failures-max: 5, window-s: 60}
Flaky:
  ServiceArgs: {workers: 2, start-deadline-s: 8}
"""


@pytest.fixture(scope="module")
def shared_flaky() -> Iterator[Served]:
    """Two workers that can be made to hang or break at their start by a file of that name."""
    files = {"flaky.py": FLAKY, "config.yaml": CONFIG}
    with Served(target=("flaky:Flaky", "-f", "config.yaml"), files=files, frontend=False) as served:
        yield served.start()


@pytest.fixture
async def flaky(shared_flaky: Served) -> AsyncIterator[Served]:
    """The module's graph with two ready workers that have no failure on record, before and after."""
    yield shared_flaky
    for name in ("hang", "break"):
        (shared_flaky.cwd / name).unlink(missing_ok=True)
    await settled(shared_flaky)
    await ascale(shared_flaky, "Flaky", "=2")
    await settled(shared_flaky)
    await asyncio.to_thread(shared_flaky.ok, "restart", "dynamo_Flaky_1", "--wait", "--json")
    await auntil(lambda: len(shared_flaky.states()) == 2, what=shared_flaky.states)


@pytest.mark.full
async def test_a_start_past_its_deadline_is_ended_and_told_with_its_log(flaky: Served) -> None:
    before = flaky.pids()
    (flaky.cwd / "hang").touch()
    done = await asyncio.to_thread(flaky.cli, "scale", "Flaky", "+1", "--wait")
    row = await auntil(lambda: _without_gpu(flaky, "Flaky_2"), what=flaky.status)
    (flaky.cwd / "hang").unlink()
    assert done.returncode == 1, done.stdout
    assert "I am dynamo_Flaky_2" in done.stderr
    assert (row["state"], row["pid"]) == ("backing_off", None)
    assert "was not ready within 8 s" in row["reason"]
    assert "StartDeadlinePassed" in kinds(events(flaky, "Flaky_2"))
    assert {name: pid for name, pid in flaky.pids().items() if name in before} == before


def _without_gpu(served: Served, name: str) -> dict[str, Any] | None:
    row = served.worker(name)
    return row if row["state"] == "backing_off" and row["gpus"] == [] else None


def _of_flaky_1(flaky: Served) -> list[dict[str, Any]]:
    return [note for note in flaky.status()["notes"] if "Flaky_1" in note["text"]]


@pytest.mark.full
async def test_a_worker_that_keeps_dying_is_faulted_until_a_person_restarts_it(flaky: Served) -> None:
    sibling = flaky.pids()["Flaky"]
    (flaky.cwd / "break").touch()
    os.kill(flaky.pids()["Flaky_1"], signal.SIGKILL)
    await auntil(lambda: flaky.states()["Flaky_1"] == "faulted", 30.0, what=flaky.states)
    await auntil(lambda: flaky.worker("Flaky_1")["gpus"] == [], 5.0)
    row = flaky.worker("Flaky_1")
    notes = await auntil(lambda: _of_flaky_1(flaky))
    capacity = await ascale(flaky, "Flaky", "=1")
    (flaky.cwd / "break").unlink()
    restart = await asyncio.to_thread(flaky.cli, "restart", "dynamo_Flaky_1", "--wait")
    assert "5 failures within 60 s" in row["reason"]
    assert "dynamo restart dynamo_Flaky_1" in notes[-1]["text"]
    assert max(note["count"] for note in notes) >= 2, "what it died of is one note"
    assert _of_flaky_1(flaky) == [], "they have gone with their cause"
    assert capacity == [], "a faulted worker counts for nothing"
    assert "I am broken by design" in flaky.log("Flaky_1")
    assert restart.returncode == 0, restart.stderr
    assert flaky.states() == {"Flaky": "ready", "Flaky_1": "ready"}
    assert flaky.pids()["Flaky"] == sibling


@pytest.mark.full
async def test_a_hung_worker_is_treated_as_crashed(flaky: Served) -> None:
    before = flaky.pids()
    seen = len(events(flaky))
    os.kill(before["Flaky_1"], signal.SIGSTOP)
    await auntil(lambda: flaky.pids().get("Flaky_1", before["Flaky_1"]) != before["Flaky_1"], 20.0, what=flaky.states)
    await settled(flaky)
    happened = kinds(record for record in events(flaky)[seen:] if record["watcher_name"] == "dynamo_Flaky_1")
    assert happened[:4] == ["HealthFailed", "ProcessExited", "BackoffStarted", "BackoffElapsed"]
    assert not is_alive(before["Flaky_1"])
    assert flaky.pids()["Flaky"] == before["Flaky"]


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.timeout(240)
def test_64_workers_are_added_in_one_command(tmp_path: Path) -> None:
    files = {"flaky.py": FLAKY}
    with Served("--gpus", "sim:66", target=("flaky:Flaky",), files=files, frontend=False).started() as served:
        began_s = time.monotonic()
        done = served.cli("scale", "Flaky", "+64")
        answered_s = time.monotonic() - began_s
        until(lambda: list(served.states().values()).count("ready") == 65, 180.0, what=served.states)
        rows = served.status()["workers"]
        served.cli("scale", "Flaky", "=1")
        until(lambda: len(served.states()) == 1, 60.0, what=served.states)
    assert done.returncode == 0, done.stderr
    assert answered_s < 10.0
    assert sorted(row["watcher_name"] for row in rows) == sorted(
        ["dynamo_Flaky", *(f"dynamo_Flaky_{n}" for n in range(1, 65))]
    )
    assert len({row["pid"] for row in rows}) == len({gpu for row in rows for gpu in row["gpus"]}) == 65
