"""The wall clock is set under load, forth and back, for all processes of ours at once: nobody is to blame for it.

libfaketime shows them another time of day. etcd and NATS keep the true one.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.drivers.scaled import ascale, events, kinds, load, settled
from tests.drivers.served import DISAGG, Served

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(300)]

FAKETIME = "/usr/lib/{}-linux-gnu/faketime/libfaketime.so.1"
JUDGED = {"HealthFailed", "StartDeadlinePassed", "DrainDeadlinePassed"}
ALWAYS_REMOTE = ("--VllmWorker.conditional-disagg=false", "--VllmWorker.sim.speed=4", "--PrefillWorker.sim.speed=1")
"""The prefill queue is never empty for long: its entries have deadlines, too."""


@dataclass(frozen=True)
class FakeClock:
    """The time of day that processes with `env` see."""

    library: str
    file: Path

    @property
    def env(self) -> dict[str, str]:
        """For a process. Monotonic clocks and the times of files stay true, as with a clock that is really set."""
        return {
            "LD_PRELOAD": self.library,
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set(self, offset_s: int) -> None:
        """All at once."""
        beside = self.file.with_suffix(".new")
        beside.write_text(f"{offset_s:+d}\n")
        os.replace(beside, self.file)


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    found = [path for machine in ("x86_64", "aarch64") if os.path.exists(path := FAKETIME.format(machine))]
    if not found:
        pytest.skip("libfaketime is not installed: apt-get install faketime")
    made = FakeClock(found[0], tmp_path / "offset")
    made.set(0)
    return made


async def test_no_stream_is_cut_and_no_worker_blamed(clock: FakeClock) -> None:
    passed = [word for name in clock.env for word in ("--pass-env", name)]
    with Served(*ALWAYS_REMOTE, "--gpus", "sim:8", *passed, target=DISAGG, env=clock.env) as served:
        served.start()
        before = served.pids()
        async with load(served, streams=12) as found:
            for offset_s in (3_600, -1_800, 0, 40, 86_400):
                clock.set(offset_s)
                await found.more(24)
            await ascale(served, "VllmWorker", "+1")
            clock.set(-3_600)
            await settled(served)
            await ascale(served, "VllmWorker", "-1")
            clock.set(7_200)
            await asyncio.wait_for(found.more(24), 60.0)
        found.check()
        assert before.items() <= served.pids().items()
        assert not set(kinds(events(served))) & JUDGED
        assert served.status()["prefill_queue"]["dead_letters"] == 0
