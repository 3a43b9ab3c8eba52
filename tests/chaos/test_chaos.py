"""The whole product on real processes under chaos and load: nothing is lost that a retry could save.

`tox -e chaos` runs it for DYN_CHAOS_SECONDS (900), `tox -e chaos-short` for 120. The seed is printed; the same
DYN_CHAOS_PLAN, DYN_CHAOS_SEED and DYN_CHAOS_SECONDS replay the same plan. docs/chaos.md says what is done and what must
hold.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.drain.client import ANSWER_S
from benchmarks.traces import conversation
from dynamo_local.arbiter.marks import marked
from tests.chaos.checks import unexplained
from tests.chaos.faults import replaced
from tests.chaos.growth import EVERY_S, Growth, Watched, trends_of
from tests.chaos.load import Clients, Tally
from tests.chaos.plan import BASE, COMMANDS, DECODE, FRONTEND, PLANS, PREFILL, Kind, steady_plan, storms_plan
from tests.chaos.world import Chaos
from tests.drivers.served import Served
from tests.tools.free_port import free_port
from tests.tools.host_faults import small_disk

pytestmark = [pytest.mark.infra]

PLAN = os.environ.get("DYN_CHAOS_PLAN") or "storms"
SECONDS = float(os.environ.get("DYN_CHAOS_SECONDS") or 120)
SEED = int(os.environ.get("DYN_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
AGAIN = f"DYN_CHAOS_PLAN={PLAN} DYN_CHAOS_SEED={SEED} DYN_CHAOS_SECONDS={SECONDS:g}"
SPARE_S = 420.0
"""For the start, the end, and whatever takes its full bound on the way."""
SHOWN = 20
DISK_BYTES = 64 * 1024 * 1024 * (1 + int(SECONDS / 3600))
"""The disk with the statefile and the logs: more than is written, little enough to be filled in a moment."""
WORDS = (
    *(f"--{name}.ServiceArgs.workers={count}" for name, count in BASE.items()),
    *(f"--{name}.ServiceArgs.standby=0" for name in (DECODE, PREFILL)),  # each may be put to sleep
    "--Common.sim.speed=0.5",  # a token takes 12 ms and more: streams last for seconds
    "--Host.spares=1",
    "--Host.health-bound-s=8",
    "--Host.restart.first-s=0.3",
    "--Host.restart.max-s=1.5",
    "--Host.restart.failures-max=100000",  # how often we kill a worker must not make it faulted
    "--on-arbiter-death",
    "keep",
)


@pytest.mark.timeout(SECONDS + SPARE_S)
async def test_nothing_is_lost_that_a_retry_could_save(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = PLANS[PLAN](SEED, SECONDS)
    with capsys.disabled():
        print(f"\nchaos: {AGAIN}, {len(plan)} actions", flush=True)
        print(f"chaos: {conversation(1).told}", flush=True)
    # Chosen here, not by the Frontend: one that is started again must be found where it was.
    port, tally = free_port(), Tally()
    disk = tmp_path / "disk"
    env = {"DYN_LOCAL_STATE_DIR": str(disk / "state"), "DYN_LOCAL_LOG_DIR": str(disk / "logs")}
    with (
        small_disk(disk, DISK_BYTES) as mounted,
        Served(*WORDS, f"--{FRONTEND}.port={port}", frontend=False, env=env) as served,
    ):
        served.start()
        async with _watched(served, disk if mounted else None) as chaos:
            clients = Clients(port, chaos.excused, chaos.calm, tally)
            load = asyncio.create_task(clients.run())
            await chaos.carry_out(plan)
            await chaos.settle()
            clients.stop()
            await asyncio.wait({load}, timeout=0 if chaos.wrong else 2 * ANSWER_S)
            chaos.wrong += [] if load.done() else [f"requests that never end: {tally.under_way}"]
            load.cancel()
        with capsys.disabled():
            print(f"chaos: {tally}; refused commands {chaos.refused}", flush=True)
        chaos.read_events()
        trends = chaos.growth.trends()
        chaos.wrong += tally.lost + unexplained(chaos.events, chaos.hurt, chaos.outage)
        chaos.wrong += [f"it grows: {trend}" for trend in trends if trend.grows]
        with capsys.disabled():
            print(*trends, sep="\n", flush=True)
        if chaos.wrong:
            pytest.fail(_report(chaos))
        assert tally.right > SECONDS, "too little load to mean anything"
        served.down()
        assert marked(served.paths) == []


@pytest.mark.parametrize(("before", "wrong"), [(["DrainRequested"], 0), ([], 1)])
def test_a_start_that_was_called_off_is_no_failed_start(before: list[str], wrong: int) -> None:
    """Its worker was to leave before its process had begun."""
    about = {"watcher_name": "w", "seq": 1, "time": 0.0, "stimulus_id": "scale:1"}
    records = [{**about, "event": event} for event in (*before, "SpawnFailed")]
    assert len(unexplained(records, set(), lambda time_s: False)) == wrong


def test_a_seed_replays_its_plan_and_every_kind_of_action_is_in_it() -> None:
    for seed in range(20):
        plan = storms_plan(seed, 120)
        assert plan == storms_plan(seed, 120) != storms_plan(seed + 1, 120)
        assert {action.kind for action in plan} == set(Kind), seed


def test_a_steady_plan_has_a_command_each_second_and_a_death_each_minute() -> None:
    plan = steady_plan(1, 3600)
    assert plan == steady_plan(1, 3600) != steady_plan(2, 3600)
    kinds = Counter(action.kind for action in plan)
    assert kinds.pop(Kind.KILL) == 60
    assert set(kinds) == set(COMMANDS)
    assert kinds.total() == 3600


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        (["draining"], False),
        (["starting"], False),
        (["ready"], True),
        (["exited", "ready"], True),
        (["starting", "ready"], False),
    ],
)
def test_a_dead_worker_is_replaced_when_somebody_serves(states: list[str], whole: bool) -> None:
    rows = [
        {"watcher_name": f"dynamo_Processor_{n}", "component": "Processor", "pid": 10 + n, "state": state}
        for n, state in enumerate(states)
    ]
    assert replaced({"workers": rows}, {**rows[0], "pid": 1}) is whole
    assert not replaced({"workers": rows}, rows[0])


def test_a_pid_that_was_given_out_again_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, started_s = Growth(), [1.0]
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started_s[0])
    growth.sample({os.getpid(): "one"}, 0.0)
    started_s[0] = 2.0
    growth.sample({os.getpid(): "another"}, 10_000.0)
    assert growth.trends() == []


@pytest.mark.parametrize(("per_hour", "grows"), [(0.0, False), (0.005, False), (0.02, True), (-0.02, False)])
def test_growth_is_told_from_noise(per_hour: float, grows: bool) -> None:
    rng = random.Random(1)
    watched = Watched("arbiter")
    for number in range(1080):
        hours = number * EVERY_S / 3600
        watched.at_s.append(hours * 3600)
        watched.values["MiB"].append(100 * (1 + per_hour * hours) + rng.uniform(-0.3, 0.3) + 50 * (number < 30))
        watched.values["descriptors"].append(50 + rng.randrange(3))
    memory, descriptors = trends_of(watched)
    assert memory.per_hour == pytest.approx(per_hour, abs=0.002)
    assert (memory.grows, descriptors.grows) == (grows, False)


@asynccontextmanager
async def _watched(served: Served, disk: Path | None) -> AsyncIterator[Chaos]:
    chaos = Chaos(served, disk)
    watchers = [asyncio.create_task(chaos.guarded(watch)) for watch in chaos.watches]
    try:
        yield chaos
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


def _report(chaos: Chaos) -> str:
    """All that it takes to understand a failure: the seed, what was done last, and what the arbiter saw."""
    more = f"\n… and {len(chaos.wrong) - SHOWN} more" if len(chaos.wrong) > SHOWN else ""
    return "\n".join(
        [
            f"{AGAIN}: {len(chaos.wrong)} things are wrong:",
            *chaos.wrong[:SHOWN],
            more,
            "--- what was done last",
            *chaos.story[-3 * SHOWN :],
            "--- faults, from and to (monotonic)",
            *(f"{fault.began_s:.2f}-{fault.ended_s or 0:.2f} {fault.what}" for fault in chaos.faults[-SHOWN:]),
            f"--- the last events, up to {time.strftime('%H:%M:%S')}",
            *chaos.last_events(),
        ]
    )
