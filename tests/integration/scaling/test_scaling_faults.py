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
    restart = await asyncio.to_thread(shared_flaky.cli, "restart", "dynamo_Flaky_1", "--wait")
    assert restart.returncode == 0, restart.stderr
    await auntil(lambda: len(shared_flaky.states()) == 2, what=shared_flaky.states)


def _times(served: Served, name: str, seen: int) -> dict[str, float]:
    """When each kind of event happened to the worker first, after so many events; seconds since 1970."""
    found: dict[str, float] = {}
    for record in events(served)[seen:]:
        if record["watcher_name"] == f"dynamo_{name}":
            found.setdefault(record["event"], record["time"])
    return found


def _gpus(served: Served) -> list[str]:
    return sorted(gpu for row in served.status()["workers"] for gpu in row["gpus"])


# --- starting ------------------------------------------------------------------------------------


@pytest.mark.full
async def test_a_start_past_its_deadline_is_ended_and_told_with_its_log(flaky: Served) -> None:
    """lesson 12: its process ends, its GPU is free, `--wait` says why, with the end of its log; siblings live on."""
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


@pytest.mark.full
async def test_several_workers_come_at_the_same_time(flaky: Served) -> None:
    seen = len(events(flaky))
    await ascale(flaky, "Flaky", "=4")
    await settled(flaky)
    spawned = [record for record in events(flaky)[seen:] if record["event"] == "Spawned"]
    ready = [record for record in events(flaky)[seen:] if record["event"] == "Registered"]

    assert {record["watcher_name"] for record in spawned} == {"dynamo_Flaky_2", "dynamo_Flaky_3"}
    assert len(spawned) == 2
    assert spawned[-1]["time"] < ready[0]["time"], "the second did not wait for the first"
    assert _gpus(flaky) == ["0", "1", "2", "3"]


# --- crashing ------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.full
async def test_a_crashed_worker_leaves_routing_at_once_and_comes_back(flaky: Served) -> None:
    """Its lease is revoked, not left to its TTL of ten seconds; the next process follows the back-off within a
    moment (`benchmarks.drain` measures it: 20 ms); siblings live on."""
    sibling, over_s = flaky.pids()["Flaky"], []
    for _ in range(4):
        seen, row = len(events(flaky)), flaky.worker("Flaky_1")
        killed_s = time.monotonic()
        os.kill(row["pid"], signal.SIGKILL)
        await auntil(lambda lease=row["lease"]: lease not in " ".join(flaky.keys()), 5.0, what=flaky.keys)
        forgotten_s = time.monotonic() - killed_s
        await auntil(lambda: "Spawned" in _times(flaky, "Flaky_1", seen), what=flaky.states)  # noqa: B023
        await settled(flaky)
        times = _times(flaky, "Flaky_1", seen)
        delay_s = next(r["delay_s"] for r in events(flaky)[seen:] if r["event"] == "BackoffStarted")
        over_s.append(times["Spawned"] - times["ProcessExited"] - delay_s)

    assert forgotten_s < 2.0
    assert min(over_s) < 0.1, over_s
    assert flaky.pids()["Flaky"] == sibling
    assert flaky.worker("Flaky_1")["restarts"] >= 2


def _of_flaky_1(flaky: Served) -> list[dict[str, Any]]:
    """The status's notes of that worker."""
    return [note for note in flaky.status()["notes"] if "Flaky_1" in note["text"]]


@pytest.mark.full
async def test_a_worker_that_keeps_dying_is_faulted_until_a_person_restarts_it(flaky: Served) -> None:
    """After the policy's number of failures it holds no GPU and says what it last wrote; `dynamo restart` clears it."""
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
async def test_exit_code_0_unasked_is_a_crash(flaky: Served) -> None:
    seen, pid = len(events(flaky)), flaky.pids()["Flaky_1"]
    os.kill(pid, signal.SIGUSR1)
    await auntil(lambda: "Registered" in _times(flaky, "Flaky_1", seen), what=flaky.states)
    happened = [record for record in events(flaky)[seen:] if record["watcher_name"] == "dynamo_Flaky_1"]

    exited = next(record for record in happened if record["event"] == "ProcessExited")
    assert (exited["exit_code"], exited["to"]) == (0, "crashed")
    assert flaky.pids()["Flaky_1"] != pid


@pytest.mark.full
async def test_a_worker_that_a_stranger_asks_to_leave_drains_and_is_removed(flaky: Served) -> None:
    """SIGTERM, as `kill PID` sends it: it leaves in order, as after a revoked lease, and is not started again."""
    pid = flaky.pids()["Flaky_1"]
    os.kill(pid, signal.SIGTERM)
    await auntil(lambda: "Flaky_1" not in flaky.states(), what=flaky.states)
    last = events(flaky, "Flaky_1")[-1]
    await ascale(flaky, "Flaky", "+1")

    assert (last["event"], last["exit_code"], last["to"]) == ("ProcessExited", 0, "exited")
    assert not is_alive(pid)


@pytest.mark.full
async def test_a_hung_worker_is_treated_as_crashed(flaky: Served) -> None:
    """SIGSTOP: its process lives and its lease does, for now; past the bound it is killed, and another one comes."""
    before = flaky.pids()
    seen = len(events(flaky))
    os.kill(before["Flaky_1"], signal.SIGSTOP)
    await auntil(lambda: flaky.pids().get("Flaky_1", before["Flaky_1"]) != before["Flaky_1"], 20.0, what=flaky.states)
    await settled(flaky)
    happened = kinds(record for record in events(flaky)[seen:] if record["watcher_name"] == "dynamo_Flaky_1")

    assert happened[:4] == ["HealthFailed", "ProcessExited", "BackoffStarted", "BackoffElapsed"]
    assert not is_alive(before["Flaky_1"])
    assert flaky.pids()["Flaky"] == before["Flaky"]


@pytest.mark.full
async def test_failures_while_nats_is_away_do_not_count(flaky: Served) -> None:
    """Each death with NATS away waits for it and is followed by a start; more of them than the policy allows is no
    fault."""
    seen = len(events(flaky))
    for _ in range(6):
        nats = await auntil(lambda: flaky.server_pid("nats"))
        os.kill(nats, signal.SIGKILL)
        os.kill(flaky.pids()["Flaky_1"], signal.SIGKILL)
        await auntil(lambda nats=nats: flaky.server_pid("nats") not in (None, nats))
        await auntil(lambda: flaky.states()["Flaky_1"] == "ready", 20.0, what=flaky.states)

    deaths = [record for record in events(flaky)[seen:] if record["event"] == "ProcessExited"]
    assert len(deaths) >= 6
    assert "Faulted" not in kinds(events(flaky)[seen:])


# --- many ----------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.timeout(240)
def test_64_workers_are_added_in_one_command(tmp_path: Path) -> None:
    """One `scale`, all of them ready, each its own name, pid and GPU; then one command takes them away again."""
    files = {"flaky.py": FLAKY}
    with Served("--gpus", "sim:66", target=("flaky:Flaky",), files=files, frontend=False) as served:
        served.start()
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
