"""`--on-arbiter-death keep` on real processes: adoption, also of what leaves, and when nothing is adopted."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY
from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import streaming
from tests.drivers.served import Served, auntil, expected, until
from tests.tools.alone import alone

pytestmark = pytest.mark.infra

KEEP = ("--on-arbiter-death", "keep")
PATIENCE_S = 15.0
STREAMS = 8
TOKENS = 4000
"""24 seconds of streaming at the least: an adoption takes a second, and more than ten have been seen on a machine that
did much else."""


@pytest.mark.full
async def test_eight_streams_live_through_the_managers_death_and_an_adoption() -> None:
    with Served(*KEEP).started() as served:
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
            await asyncio.to_thread(served.ok, "scale", *words, "--wait")
        assert served.pids() == pids


@pytest.mark.full
def test_an_adopted_worker_drains_restarts_and_crashes_as_any_other() -> None:
    """A pidfd tells its exit, without a code. Its GPU returns to it, and this arbiter locks it then."""
    with alone(*KEEP, name="Alone").started() as served:
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
        served.ok("restart", "Alone", "--force", "--wait")
        assert crashed["workers"][0]["gpus"] == gpus["dynamo_Alone"]
        assert len(served.status()["workers"][0]["gpus"]) == 1


@pytest.mark.full
def test_what_died_meanwhile_is_started_again_at_the_adoption() -> None:
    with alone(*KEEP, name="Alone").started() as served:
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


LEAVING_TOKENS = 2500


@pytest.mark.full
async def test_a_worker_that_somebody_revoked_goes_on_leaving_and_its_return_is_counted() -> None:
    with Served("--Host.on-foreign-revoke=restart", "--VllmWorker.ServiceArgs.workers=2", *KEEP).started() as served:
        before = served.pids()
        async with streaming(served, *(f"Revoked {n}." for n in range(4)), tokens=LEAVING_TOKENS) as streams:
            served.etcdctl("lease", "revoke", served.worker("VllmWorker_1")["lease"])
            await auntil(lambda: served.states()["VllmWorker_1"] == "draining", PATIENCE_S, what=served.status)
            await asyncio.to_thread(served.kill_arbiter)
            assert is_alive(before["VllmWorker_1"]), "its streams were to outlast the arbiter"
            await asyncio.to_thread(served.adopt)
            answers = await asyncio.gather(*streams)
        assert answers == [expected(f"Revoked {n}.", LEAVING_TOKENS, ignore_eos=True) for n in range(4)]
        await auntil(lambda: served.pids().get("VllmWorker_1") not in (None, before["VllmWorker_1"]), 40.0,
                     what=served.status)  # fmt: skip
        await auntil(lambda: set(served.states().values()) == {"ready"}, 40.0, what=served.status)
        failures = {name: entry.get("failures_s") for name, entry in served.statefile()["components"].items()}
        assert {name: len(found) for name, found in failures.items() if found} == {"dynamo_VllmWorker_1": 1}
        assert served.status()["state"] == "ready"


@pytest.mark.full
async def test_a_rolling_restart_goes_on_after_the_adoption() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2", *KEEP).started() as served:
        before = served.pids()
        async with streaming(served, *(f"Roll {n}." for n in range(4)), tokens=LEAVING_TOKENS) as streams:
            assert (await asyncio.to_thread(served.cli, "restart", "--rolling", "VllmWorker")).returncode == 0
            assert served.statefile()["restarts"][0]["todo"].keys() == {"dynamo_VllmWorker", "dynamo_VllmWorker_1"}
            await auntil(lambda: "draining" in served.states().values(), what=served.states)
            await asyncio.to_thread(served.kill_arbiter)
            assert {name: is_alive(pid) for name, pid in before.items()} == dict.fromkeys(before, True)
            await asyncio.to_thread(served.adopt)
            answers = await asyncio.gather(*streams)
        assert answers == [expected(f"Roll {n}.", LEAVING_TOKENS, ignore_eos=True) for n in range(4)]
        await auntil(lambda: "restarts" not in served.statefile(), 40.0, what=served.status)
        after = served.pids()
        assert set(served.states().values()) == {"ready"}
        changed = {name for name in before if after[name] != before[name]}
        assert changed == {"VllmWorker", "VllmWorker_1"}


@pytest.mark.full
async def test_down_without_an_arbiter_lets_streams_finish() -> None:
    with Served(*KEEP).started() as served:
        async with streaming(served, "A last one.", tokens=LEAVING_TOKENS) as (stream,):
            await asyncio.to_thread(served.kill_arbiter)
            done = await asyncio.to_thread(served.down)
            assert await stream == expected("A last one.", LEAVING_TOKENS, ignore_eos=True)
        assert "its arbiter is dead" in done.stdout
        assert served.leftovers() == []


@pytest.mark.full
def test_an_adoption_that_fails_leaves_everything_serving() -> None:
    with alone(*KEEP, name="Alone").started() as served:
        pids, guardian = served.pids(), served.status()["guardian_pid"]
        token = served.paths.runtime / "nats" / "token"
        served.kill_arbiter()
        other = served.cli(*served.serve_words("--adopt", "--detach", "--Alone.colour=red"))
        token.unlink()
        assert other.returncode == EXIT_BAD_INPUT
        assert "Alone.colour" in other.stderr
        assert [pid for pid in (guardian, *pids.values()) if not is_alive(pid)] == []
        served.adopt()
        assert served.pids() == pids
        assert token.exists()


def test_serve_beside_live_workers_refuses_and_replace_ends_them() -> None:
    with alone(*KEEP, name="Alone").started() as served:
        pid, run_id = served.pids()["Alone"], served.status()["run_id"]
        served.kill_arbiter()
        refused = served.cli(*served.serve_words("--detach"))
        assert refused.returncode == EXIT_BUSY
        for way in ("--adopt", "--replace", "dynamo down"):
            assert way in refused.stderr
        assert is_alive(pid)
        replaced = served.ok(*served.serve_words("--detach", "--replace"))
        assert "what they stream is cut" in replaced
        assert f"ended: dynamo_Alone (pid {pid})" in replaced
        assert not is_alive(pid)
        assert served.status()["run_id"] != run_id
        assert len(served.pids_of("circus_plugins.guardian")) == 1


@pytest.mark.full
def test_a_statefile_that_somebody_broke_cannot_be_adopted_but_ended() -> None:
    with alone(*KEEP, name="Alone").started() as served:
        pid = served.pids()["Alone"]
        served.kill_arbiter(guardian=True)
        served.paths.statefile.write_text("{")
        adopted = served.cli(*served.serve_words("--adopt", "--detach"))
        plain = served.cli(*served.serve_words("--detach"))
        assert is_alive(pid)
        served.down()
        assert adopted.returncode != 0
        assert "not valid JSON" in adopted.stderr
        assert plain.returncode == EXIT_BUSY
        assert not is_alive(pid)
        aside = list(Path(served.paths.statefile.parent).glob("*.corrupt-*"))
        assert len(aside) == 1
