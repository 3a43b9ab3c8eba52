"""`--on-arbiter-death keep`, and what comes after it: adopt, replace, down; on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY, EXIT_NOT_RUNNING
from dynamo_local.serve.processes import is_alive
from tests.fakes.served import Served, auntil, expected, stream_chat, until

pytestmark = pytest.mark.infra

KEEP = ("--on-arbiter-death", "keep")
PATIENCE_S = 15.0
STREAMS = 20
TOKENS = 900
"""More than five seconds of streaming."""

ALONE = """\
from dynamo_local.sdk import endpoint, service


@service(name="Alone", resources={"gpu": 1})
class Alone:
    @endpoint()
    async def generate(self, request: dict):
        yield {}
"""


def alone(*words: str) -> Served:
    """One component with a GPU of eight, without a frontend: quick to start."""
    return Served("--gpus", "sim:8", *words, target=("app:Alone",), files={"app.py": ALONE}, frontend=False)


async def streaming(client: AsyncOpenAI, prompts: list[str]) -> list[asyncio.Task[tuple[str, str | None]]]:
    """Streams of `TOKENS` tokens, all of which have begun."""
    begun = [asyncio.Event() for _ in prompts]
    streams = [
        asyncio.create_task(stream_chat(client, prompt, TOKENS, ignore_eos=True, started=started))
        for prompt, started in zip(prompts, begun, strict=True)
    ]
    await asyncio.gather(*(started.wait() for started in begun))
    return streams


# --- adopt ---------------------------------------------------------------------------------------


async def test_twenty_streams_live_through_the_managers_death_and_an_adoption() -> None:
    """No request fails, no process is new, the run is the same; it scales up and down, and `down` leaves nothing."""
    with Served(*KEEP) as served:
        served.start()
        before, pids = served.status(), served.pids()
        etcd, nats = served.server_pid("etcd"), served.server_pid("nats")
        async with served.client() as client:
            prompts = [f"Story number {n}, please." for n in range(STREAMS)]
            begun = [asyncio.Event() for _ in prompts]
            streams = [
                asyncio.create_task(stream_chat(client, prompt, TOKENS, ignore_eos=True, started=started))
                for prompt, started in zip(prompts, begun, strict=True)
            ]
            await asyncio.gather(*(started.wait() for started in begun))

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
        names = ("etcd", "frontend", "guardian", "nats", "prefillworker", "processor", "vllmworker")
        assert listed == [f"dynamo_{name}" for name in names]
        assert served.cli("ctl", "list", "dynamo_VllmWorker").stdout.strip() == str(pids["VllmWorker"])

        for words in (("VllmWorker", "+1"), ("VllmWorker", "-1")):
            done = await asyncio.to_thread(served.cli, "scale", *words, "--wait")
            assert done.returncode == 0, done.stderr
        assert served.pids() == pids


def test_an_adopted_worker_drains_restarts_and_crashes_as_any_other() -> None:
    """Its exit is seen by a pidfd, without a code; its GPU comes back to it, and is locked by us then."""
    with alone(*KEEP) as served:
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


def test_what_died_meanwhile_is_started_again_at_the_adoption() -> None:
    """A worker and NATS died while nobody was there: both come back, the other worker is the same process."""
    with alone(*KEEP) as served:
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


async def test_a_drain_goes_on_after_the_adoption() -> None:
    """Committed by the old arbiter, finished under the new one: the stream is whole, the worker is removed."""
    with Served(*KEEP) as served:
        served.start()
        assert served.cli("scale", "VllmWorker", "+1", "--wait").returncode == 0
        async with served.client() as client:
            streams = await streaming(client, [f"Drain {n}." for n in range(4)])
            assert (await asyncio.to_thread(served.cli, "drain", "dynamo_VllmWorker_1")).returncode == 0
            await asyncio.to_thread(served.kill_arbiter)
            await asyncio.to_thread(served.adopt)

            answers = await asyncio.gather(*streams)
            await auntil(lambda: "VllmWorker_1" not in served.states(), PATIENCE_S, what=served.status)

        assert answers == [expected(f"Drain {n}.", TOKENS, ignore_eos=True) for n in range(4)]
        assert served.states()["VllmWorker"] == "ready"


async def test_a_rolling_restart_goes_on_after_the_adoption() -> None:
    """The arbiter dies while the first of two workers drains: its successor restarts that one, and then the other."""
    with Served("--VllmWorker.ServiceArgs.workers=2", *KEEP) as served:
        served.start()
        before = served.pids()
        async with served.client() as client:
            streams = await streaming(client, [f"Roll {n}." for n in range(4)])
            assert (await asyncio.to_thread(served.cli, "restart", "--rolling", "VllmWorker")).returncode == 0
            assert served.statefile()["restarts"][0]["todo"].keys() == {"dynamo_VllmWorker", "dynamo_VllmWorker_1"}
            await auntil(lambda: "draining" in served.states().values(), what=served.states)
            await asyncio.to_thread(served.kill_arbiter)
            assert {name: is_alive(pid) for name, pid in before.items()} == dict.fromkeys(before, True)
            await asyncio.to_thread(served.adopt)
            answers = await asyncio.gather(*streams)
        assert answers == [expected(f"Roll {n}.", TOKENS, ignore_eos=True) for n in range(4)]
        await auntil(lambda: "restarts" not in served.statefile(), 40.0, what=served.status)
        after = served.pids()
        assert set(served.states().values()) == {"ready"}
        changed = {name for name in before if after[name] != before[name]}
        assert changed == {"VllmWorker", "VllmWorker_1"}


def test_an_adoption_that_fails_leaves_everything_serving() -> None:
    """Another command line, or a file that is missing: refused, nothing is ended, and the right words still work."""
    with alone(*KEEP) as served:
        served.start()
        pids, guardian = served.pids(), served.status()["guardian_pid"]
        token = served.paths.runtime / "nats" / "token"
        served.kill_arbiter()

        other = served.cli(*served.serve_words("--adopt", "--detach", "--Alone.colour=red"))
        token.rename(token.with_name("elsewhere"))
        broken = served.cli(*served.serve_words("--adopt", "--detach"))
        token.with_name("elsewhere").rename(token)

        assert other.returncode == EXIT_BAD_INPUT
        assert "Alone.colour" in other.stderr
        assert broken.returncode != 0
        assert "token" in broken.stderr
        assert [pid for pid in (guardian, *pids.values()) if not is_alive(pid)] == []
        served.adopt()
        assert served.pids() == pids


def test_the_policy_stays_unless_said_otherwise() -> None:
    """An adopted run keeps `keep`; `--adopt --on-arbiter-death end` changes it, and then the guardian ends it."""
    with alone(*KEEP) as served:
        served.start()
        served.kill_arbiter()
        served.adopt()
        assert served.status()["on_arbiter_death"] == "keep"
        served.kill_arbiter()
        served.adopt("--on-arbiter-death", "end")
        assert served.status()["on_arbiter_death"] == "end"
        served.kill_arbiter()

        until(lambda: served.leftovers() == [], PATIENCE_S, what=served.leftovers)

        nothing = served.cli(*served.serve_words("--adopt", "--detach"))
        assert nothing.returncode == EXIT_NOT_RUNNING


# --- serve, replace, down ------------------------------------------------------------------------


def test_serve_beside_live_workers_refuses_and_replace_ends_them() -> None:
    """lesson 3: refused with the three ways out; `--replace` says that it cuts, ends them, and starts anew."""
    with alone(*KEEP) as served:
        served.start()
        pid, run_id = served.pids()["Alone"], served.status()["run_id"]
        served.kill_arbiter()

        refused = served.cli(*served.serve_words("--detach"))
        assert refused.returncode == EXIT_BUSY
        for way in ("--adopt", "--replace", "dynamo down"):
            assert way in refused.stderr
        assert is_alive(pid)

        replaced = served.cli(*served.serve_words("--detach", "--replace"))
        assert replaced.returncode == 0, replaced.stderr
        assert "what they stream is cut" in replaced.stdout
        assert f"ended: dynamo_Alone (pid {pid})" in replaced.stdout
        assert not is_alive(pid)
        assert served.status()["run_id"] != run_id
        assert len(served.pids_of("circus_plugins.guardian")) == 1


async def test_down_without_an_arbiter_lets_streams_finish() -> None:
    """The same three stages, by the command itself; then nothing is left."""
    with Served(*KEEP) as served:
        served.start()
        async with served.client() as client:
            begun = asyncio.Event()
            stream = asyncio.create_task(stream_chat(client, "A last one.", TOKENS, ignore_eos=True, started=begun))
            await begun.wait()
            await asyncio.to_thread(served.kill_arbiter)

            done = await asyncio.to_thread(served.down)

            assert await stream == expected("A last one.", TOKENS, ignore_eos=True)
        assert "its arbiter is dead" in done.stdout
        assert served.leftovers() == []


def test_a_statefile_that_somebody_broke_cannot_be_adopted_but_ended() -> None:
    """Nobody can tell what the workers are for: refused, then `dynamo down` finds them by their marks."""
    with alone(*KEEP) as served:
        served.start()
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
