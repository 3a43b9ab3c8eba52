"""The wall clock is set under load, forth and back, for all processes of ours at once: nobody is to blame for it.

A `sitecustomize` shows our processes another time of day: setting the clock of the host that runs the tests is out of
the question, and libfaketime breaks `time.sleep`. etcd and NATS keep the true time.
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

JUDGED = {"HealthFailed", "StartDeadlinePassed", "DrainDeadlinePassed"}
ALWAYS_REMOTE = ("--VllmWorker.conditional-disagg=false", "--VllmWorker.sim.speed=4", "--PrefillWorker.sim.speed=1")
"""The prefill queue is never empty for long: its entries have deadlines, too."""
AHEAD_S = 86_400
"""The shown time is never behind the true one. gRPC's Python part makes deadlines of the shown time. Its core compares
them with the true one."""
SHOWN = """
import time
_true, _true_ns, _file = time.time, time.time_ns, {file!r}
def _offset_s():
    with open(_file) as file:
        return int(file.read())
time.time = lambda: _true() + _offset_s()
time.time_ns = lambda: _true_ns() + _offset_s() * 1_000_000_000
"""


@dataclass(frozen=True)
class FakeClock:
    """The time of day that Python processes with `env` see."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """For a process."""
        return {"PYTHONPATH": os.pathsep.join((str(self.folder), os.environ.get("PYTHONPATH", "")))}

    def set(self, offset_s: int) -> None:
        """All at once."""
        beside = self.folder / "new"
        beside.write_text(str(AHEAD_S + offset_s))
        beside.replace(self.folder / "offset")


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    made = FakeClock(tmp_path)
    made.set(0)
    (tmp_path / "sitecustomize.py").write_text(SHOWN.format(file=str(tmp_path / "offset")))
    return made


async def test_no_stream_is_cut_and_no_worker_blamed(clock: FakeClock) -> None:
    with Served(*ALWAYS_REMOTE, "--gpus", "sim:8", target=DISAGG, env=clock.env) as served:
        served.start()
        before = served.pids()
        async with load(served, streams=12) as found:
            for offset_s in (3_600, -1_800, 0, 40, 40_000):
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
        assert "expired unprefilled" not in served.log("PrefillWorker")
