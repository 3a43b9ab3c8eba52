"""Workers and the arbiter die, hang or lose their leases while requests run; the others, and the clients, go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from dynamo_local.errors import EXIT_NOT_RUNNING
from dynamo_local.serve.processes import is_alive
from tests.fakes.served import Served, asking, auntil, expected, stream_chat, until

pytestmark = pytest.mark.infra

LONG_PROMPT = "word " * 400

WITH_CHILD = """\
import subprocess
from dynamo_local.sdk import async_on_start, endpoint, service


@service(name="Parent")
class Parent:
    @async_on_start
    async def start(self):
        self.child = subprocess.Popen(["sleep", "1000"])
        print("child", self.child.pid, flush=True)
"""


@asynccontextmanager
async def _streaming(served: Served, prompt: str, tokens: int) -> AsyncIterator[asyncio.Task[tuple[str, str | None]]]:
    """A stream of exactly so many tokens (about 6 ms each) that has begun."""
    async with served.client() as client:
        started = asyncio.Event()
        stream = asyncio.create_task(stream_chat(client, prompt, tokens, ignore_eos=True, started=started))
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait({stream, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert not stream.done(), stream
        try:
            yield stream
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)


async def _ask(served: Served, prompt: str, tokens: int = 8) -> str | None:
    async with served.client() as client:
        return (await client.chat.completions.create(**asking(prompt, tokens))).choices[0].message.content


# --- workers -------------------------------------------------------------------------------------


async def test_a_killed_decode_worker_costs_its_streams_and_nothing_else() -> None:
    """lesson 2, lesson 12: the client gets an error at once, the registry forgets the worker, the others live on."""
    with Served() as served:
        served.start()
        before = served.pids()
        lease = served.worker("VllmWorker")["lease"]
        async with httpx.AsyncClient(base_url=served.url, timeout=30.0) as http:
            body = {**asking("Die in the middle.", 50_000), "ignore_eos": True, "stream": True}
            body |= body.pop("extra_body", {})
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                os.kill(before["VllmWorker"], signal.SIGKILL)
                killed_s = time.monotonic()
                rest = [line async for line in lines if line]
                error_s = time.monotonic() - killed_s
            await auntil(lambda: lease not in " ".join(served.keys()), 2.0, what=served.keys)
            forgotten_s = time.monotonic() - killed_s
            refused = await http.post("/v1/chat/completions", json=asking("Anybody there?", 4))
        row = served.worker("VllmWorker")
        await auntil(lambda: served.states()["VllmWorker"] == "ready", what=served.states)
        assert await _ask(served, "Risen from the dead.") == expected("Risen from the dead.", 8)[0]
        after = served.pids()

    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert "worker" in error["message"], error
    assert not any(line == "data: [DONE]" for line in rest), "a cut stream must not look finished"
    assert error_s < 1.0
    assert forgotten_s < 2.0
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert row["state"] in ("crashed", "backing_off")
    assert "SIGKILL" in row["reason"]
    assert {name for name in before if before[name] != after[name]} == {"VllmWorker"}


async def test_the_other_decode_worker_takes_over(two_by_two: Served) -> None:
    """lesson 2: with two workers no later request fails, whichever of them was killed."""
    before = two_by_two.pids()
    os.kill(before["VllmWorker_1"], signal.SIGKILL)

    prompts = [f"Take over, number {n}." for n in range(10)]
    answers = await asyncio.gather(*(_ask(two_by_two, prompt) for prompt in prompts))

    assert answers == [expected(prompt, 8)[0] for prompt in prompts]
    await auntil(lambda: two_by_two.states()["VllmWorker_1"] == "ready", what=two_by_two.states)
    after = two_by_two.pids()
    assert {name for name in before if before[name] != after[name]} == {"VllmWorker_1"}


async def test_a_killed_prefill_workers_entry_is_done_by_another() -> None:
    """lesson 17: the queue delivers an unacknowledged entry again; the client sees a pause of `ack_wait`, no error."""
    words = ("--PrefillWorker.ServiceArgs.workers=2", '--PrefillWorker.sim={"speed": 0.02}')
    with Served(*words) as served:
        served.start()
        request = asyncio.create_task(_ask(served, LONG_PROMPT, 16))
        victim = await auntil(lambda: _computing(served), what=lambda: served.status()["workers"])
        began_s = time.monotonic()
        os.kill(served.pids()[victim], signal.SIGKILL)
        answer = await request
        took_s = time.monotonic() - began_s
        decode_log = served.log("VllmWorker")

    assert answer == expected(LONG_PROMPT, 16)[0]
    assert "Remote prefill: True" in decode_log
    assert "prefilled locally" not in decode_log
    assert took_s < 12.0


async def test_without_any_prefill_worker_left_the_decode_worker_does_it_itself() -> None:
    """lesson 17: the only prefill worker is killed in mid-prefill; past its deadline the request is done locally."""
    words = ('--PrefillWorker.sim={"speed": 0.001}', "--VllmWorker.prefill-timeout-s=3")
    with Served(*words) as served:
        served.start()
        request = asyncio.create_task(_ask(served, LONG_PROMPT, 16))
        victim = await auntil(lambda: _computing(served), what=lambda: served.status()["workers"])
        began_s = time.monotonic()
        os.kill(served.pids()[victim], signal.SIGKILL)
        answer = await request
        took_s = time.monotonic() - began_s
        decode_log = served.log("VllmWorker")

    assert answer == expected(LONG_PROMPT, 16)[0]
    assert "prefilled locally" in decode_log
    assert took_s < 5.0


def _computing(served: Served) -> str | None:
    """The prefill worker that has an entry in hand, by the samples of its load."""
    for worker in served.status()["workers"]:
        if worker["component"] == "PrefillWorker" and worker["load"] and worker["load"]["request_active_slots"]:
            return str(worker["watcher_name"]).removeprefix("dynamo_")
    return None


# --- leases --------------------------------------------------------------------------------------


async def test_a_worker_whose_lease_is_revoked_finishes_and_does_not_come_back() -> None:
    """`etcdctl lease revoke`, as the predecessor's tools drain: draining, its stream completes, exit, no new key."""
    with Served("--VllmWorker.ServiceArgs.workers=2") as served:
        served.start()
        async with _streaming(served, "Let me finish.", 400) as stream:
            name = await auntil(lambda: _streaming_worker(served), what=served.status)
            row = served.worker(name)
            served.etcdctl("lease", "revoke", row["lease"])
            await auntil(lambda: served.states()[name] == "draining", 2.0, what=served.states)
            assert not stream.done()
            assert row["lease"] not in " ".join(served.keys())
            assert await _ask(served, "Who else?") == expected("Who else?", 8)[0]
            assert await stream == expected("Let me finish.", 400, ignore_eos=True)
        await auntil(lambda: not is_alive(row["pid"]), 5.0)
        await auntil(lambda: served.states().get(name, "exited") == "exited", 5.0, what=served.states)
        assert "gone" in served.log(name).splitlines()[-1]
        workers = served.keys("dynamo/components/VllmWorker/generate")
        await auntil(lambda: _freed(served, name), 10.0, what=served.statefile)

    assert len(workers) == 1, workers


def _freed(served: Served, name: str) -> bool:
    """The statefile holds no GPU, lease or pid for the worker: once its device's memory was seen to be free."""
    entry = served.statefile()["components"].get(f"dynamo_{name}")
    return entry is None or (entry.get("lease"), entry.get("pid"), entry["resources"]) == (None, None, {})


def _streaming_worker(served: Served) -> str | None:
    for worker in served.status()["workers"]:
        if worker["component"] == "VllmWorker" and worker["load"] and worker["load"]["request_active_slots"]:
            return str(worker["watcher_name"]).removeprefix("dynamo_")
    return None


async def test_a_worker_that_was_stopped_past_its_lease_comes_back() -> None:
    """SIGSTOP (a suspended laptop, a debugger): its lease expires, and once it goes on it registers again."""
    with Served(env={"DYN_LEASE_TTL_S": "2"}) as served:
        served.start()
        before = served.pids()
        os.kill(before["VllmWorker"], signal.SIGSTOP)
        try:
            await auntil(lambda: served.worker("VllmWorker")["lease"] is None, what=served.status)
            began_s = time.monotonic()
            with pytest.raises(openai.APIStatusError) as refused:
                await _ask(served, "Are you awake?")
            took_s = time.monotonic() - began_s
        finally:
            os.kill(before["VllmWorker"], signal.SIGCONT)
        await auntil(lambda: served.states()["VllmWorker"] == "ready", what=served.states)
        assert await _ask(served, "Good morning.") == expected("Good morning.", 8)[0]
        assert served.pids() == before

    assert refused.value.status_code == 503
    assert took_s < 3.0


# --- the arbiter ---------------------------------------------------------------------------------


def test_a_killed_arbiter_takes_its_workers_along_and_the_next_start_is_clean() -> None:
    """lesson 3, lesson 10: no orphan keeps a GPU; `status` says so; `serve` clears what was left and starts anew."""
    with Served() as served:
        served.start()
        first = served.status()
        pids = [first["arbiter_pid"], *served.pids().values(), served.server_pid("etcd"), served.server_pid("nats")]
        os.kill(first["arbiter_pid"], signal.SIGKILL)
        until(lambda: not [pid for pid in pids if pid and is_alive(pid)], 5.0, what=served.processes)

        status, down = served.cli("status"), served.cli("down")
        assert (status.returncode, down.returncode) == (EXIT_NOT_RUNNING, EXIT_NOT_RUNNING)
        assert "has been killed" in status.stderr, "not after the whole timeout, but as soon as its lock is seen free"
        assert "dynamo serve" in status.stderr

        served.start()
        assert served.status()["run_id"] != first["run_id"]
        assert set(served.states().values()) == {"ready"}
        leases = {worker["lease"] for worker in served.status()["workers"]}
        assert {key.rpartition(":")[2] for key in served.keys("dynamo/components/")} <= leases


def test_children_of_a_dead_worker_die_with_it() -> None:
    """lesson 3: what an engine started in its session does not outlive its worker (it would keep VRAM)."""
    with Served(target=("app:Parent",), files={"app.py": WITH_CHILD}, frontend=False) as served:
        served.start()
        child = _child(served)
        os.kill(served.pids()["Parent"], signal.SIGKILL)

        until(lambda: not is_alive(child), 5.0)
        until(lambda: served.states()["Parent"] == "ready", what=served.states)
        assert _child(served) != child


def test_orphans_of_a_killed_arbiter_are_swept_at_the_next_start() -> None:
    """lesson 3: a worker's own child survives `kill -9` of the arbiter; the environment marks it as ours."""
    with Served(target=("app:Parent",), files={"app.py": WITH_CHILD}, frontend=False) as served:
        served.start()
        child = _child(served)
        os.kill(served.status()["arbiter_pid"], signal.SIGKILL)
        until(lambda: not served.pids_of("serve_dynamo"), 5.0)

        served.start()

        assert not is_alive(child)


def _child(served: Served) -> int:
    """The pid that the last of the Parents wrote."""
    return int(re.findall(r"child (\d+)", served.log("Parent"))[-1])
