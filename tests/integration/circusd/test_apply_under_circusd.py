"""`dynamo apply` of a graph under somebody's own circusd: the file of their ini, and no other."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import yaml

from tests.drivers.guests import READY_TIMEOUT_S, guest
from tests.drivers.scaled import load, settled
from tests.drivers.served import auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


@pytest.mark.full
async def test_the_edited_file_is_applied_and_outlives_the_plugin() -> None:
    with guest() as under:
        served, before = under.ready().served, under.served.pids()
        file = served.folder / "disagg.yaml"
        content = yaml.safe_load(file.read_text())
        content["VllmWorker"].setdefault("sim", {})["speed"] = 3.0
        file.write_text(yaml.safe_dump(content))
        async with load(served, streams=4) as streams:
            done = await asyncio.to_thread(served.cli, "apply", "-f", str(file), timeout_s=90.0)
            assert done.returncode == 0, done.stdout + done.stderr
            await streams.more(8)
        streams.check()
        after = served.pids()
        assert after.keys() == {"Frontend", "PrefillWorker", "VllmWorker_1"}
        assert after.items() - before.items() == {("VllmWorker_1", after["VllmWorker_1"])}

        other = served.folder / "other.yaml"
        other.write_text(file.read_text())
        for words in ((str(other),), (str(file), "--VllmWorker.sim.speed=1")):
            refused = await asyncio.to_thread(served.cli, "apply", "-f", *words)
            assert refused.returncode == 2
            assert f"circusd starts this graph from {file}" in refused.stderr

        plugin = under.plugin_pid()
        os.kill(plugin, signal.SIGKILL)
        came_back = lambda: under.is_ready() and under.plugin_pid() != plugin  # noqa: E731
        await auntil(came_back, READY_TIMEOUT_S, what=under.logs)
        await settled(served)
        assert served.pids() == after
