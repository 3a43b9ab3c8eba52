"""`--on-arbiter-death keep`, and what comes after it: adopt, replace, down; on real processes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import streaming
from tests.drivers.served import Served, expected, until
from tests.tools.alone import alone

pytestmark = pytest.mark.infra

KEEP = ("--on-arbiter-death", "keep")
PATIENCE_S = 15.0
STREAMS = 8
TOKENS = 4000
"""24 seconds of streaming at the least: an adoption takes a second, and more than ten have been seen on a machine that
did much else."""


async def test_eight_streams_live_through_the_managers_death_and_an_adoption() -> None:
    with Served(*KEEP) as served:
        served.start()
        before, pids = served.status(), served.pids()
        etcd, nats = served.server_pid("etcd"), served.server_pid("nats")
        prompts = [f"Story number {n}, please." for n in range(STREAMS)]
        async with streaming(served, *prompts, tokens=TOKENS) as streams:
            await asyncio.to_thread(served.kill_arbiter)
            assert is_alive(before["guardian_pid"])
            await asyncio.to_thread(served.adopt)

            after = served.status()
            assert not all(stream.done() for stream in streams), "the streams were to outlast the adoption"
            answers = await asyncio.gather(*streams)
            assert answers == [expected(prompt, TOKENS, ignore_eos=True) for prompt in prompts]

        assert after["run_id"] == before["run_id"]
        assert after["state"] == "ready"
        assert after["arbiter_pid"] != before["arbiter_pid"]
        assert served.pids() == pids
        assert (served.server_pid("etcd"), served.server_pid("nats")) == (etcd, nats)
        assert {row["lease"] for row in after["workers"]} == {row["lease"] for row in before["workers"]}
        assert not is_alive(before["guardian_pid"])
        assert is_alive(after["guardian_pid"])
        listed = served.cli("ctl", "list").stdout.strip().split(",")
        names = ("etcd", "frontend", "guardian", "nats", "prefillworker", "vllmworker")
        assert listed == [f"dynamo_{name}" for name in names]
        assert served.cli("ctl", "list", "dynamo_VllmWorker").stdout.strip() == str(pids["VllmWorker"])

        for words in (("VllmWorker", "+1"), ("VllmWorker", "-1")):
            done = await asyncio.to_thread(served.cli, "scale", *words, "--wait")
            assert done.returncode == 0, done.stderr
        assert served.pids() == pids


@pytest.mark.full
def test_an_adopted_worker_drains_restarts_and_crashes_as_any_other() -> None:
    """A pidfd tells its exit, without a code. Its GPU returns to it, and this arbiter locks it then."""
    with alone(*KEEP, name="Alone") as served:
        served.start()
        assert served.cli("scale", "Alone", "+1", "--wait").returncode == 0
        gpus = {row["watcher_name"]: row["gpus"] for row in served.status()["workers"]}
        pids = served.pids()
        served.kill_arbiter(guardian=True)
        served.adopt()
        assert served.pids() == pids

        assert served.cli("drain", "dynamo_Alone_1", "--wait").returncode == 0
        assert served.states() == {"Alone": "ready"}
        os.kill(pids["Alone"], signal.SIGKILL)
        until(lambda: served.pids().get("Alone") not in (None, pids["Alone"]), PATIENCE_S, what=served.status)
        until(lambda: served.states() == {"Alone": "ready"}, PATIENCE_S, what=served.status)
        crashed = served.status()
        done = served.cli("restart", "Alone", "--force", "--wait")

        assert done.returncode == 0, done.stderr
        assert crashed["workers"][0]["gpus"] == gpus["dynamo_Alone"]
        assert len(served.status()["workers"][0]["gpus"]) == 1


@pytest.mark.full
def test_what_died_meanwhile_is_started_again_at_the_adoption() -> None:
    with alone(*KEEP, name="Alone") as served:
        served.start()
        assert served.cli("scale", "Alone", "+1", "--wait").returncode == 0
        pids, nats = served.pids(), served.server_pid("nats")
        guardian = served.status()["guardian_pid"]
        assert nats is not None
        served.kill_arbiter()
        os.kill(pids["Alone_1"], signal.SIGKILL)
        until(lambda: "dynamo_Alone_1" in served.log("guardian"), PATIENCE_S)
        os.kill(nats, signal.SIGKILL)
        until(lambda: not is_alive(nats), PATIENCE_S)
        assert is_alive(guardian)

        served.adopt()

        until(lambda: served.states() == {"Alone": "ready", "Alone_1": "ready"}, PATIENCE_S, what=served.status)
        assert served.pids()["Alone"] == pids["Alone"]
        assert served.pids()["Alone_1"] != pids["Alone_1"]
        assert served.server_pid("nats") not in (None, nats)
