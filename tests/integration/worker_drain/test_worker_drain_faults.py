"""Worker drains while etcd, NATS or the engine goes away, and of the shipped components while requests stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from dynamo_local.components import messages
from dynamo_local.errors import DrainNotCancellable, NoWorkers, WorkerDraining, WorkerLost
from dynamo_local.ports import SamplingParams
from tests.drivers.scaled import streaming
from tests.drivers.served import EXAMPLE, Served, auntil, expected, stream_chat
from tests.drivers.servers import RealEtcd, RealNats
from tests.drivers.without_arbiter.worker_process import WorkerHost, WorkerUnderTest, worker_host

pytestmark = pytest.mark.infra

DISAGG = "graphs.disagg:Frontend"


@pytest.fixture
async def host(own_etcd: RealEtcd, own_nats: RealNats, namespace: str, tmp_path: Path) -> AsyncIterator[WorkerHost]:
    folder = tmp_path / "host"
    folder.mkdir()
    async with worker_host(own_etcd, own_nats, namespace, folder) as made:
        yield made


async def refused(worker: WorkerUnderTest, lease: int) -> None:
    """Return once the worker sends new requests on; they are served until then."""
    client = await worker.host.client("Counter", "count")
    async with asyncio.timeout(5):
        while True:
            try:
                stream = await client.call({"to": 1, "interval_s": 0}, instance_id=lease)
            except WorkerDraining:
                return
            await stream.aclose()
            await asyncio.sleep(0.02)


async def test_a_drain_without_etcd_sends_requests_on_and_finishes(host: WorkerHost, own_etcd: RealEtcd) -> None:
    worker = await host.start("Counter")
    lease = int(await worker.registered(), 16)
    counting = await host.counting(worker, 200)
    await own_etcd.kill()
    worker.signal(signal.SIGTERM)
    await refused(worker, lease)
    status = await worker.status()
    assert (status["state"], status["lease"]) == ("draining", f"{lease:x}")
    assert not counting.done()
    assert await counting == list(range(200))
    assert await worker.exit_code() == 0
    assert "the keys stay" in worker.log


async def test_a_drain_is_taken_back_before_etcd_has_answered(host: WorkerHost, own_etcd: RealEtcd) -> None:
    """Nothing was stopped yet, so nothing has to start again."""
    worker = await host.start("PrefillWorker", target=DISAGG)
    own_etcd.pause()
    try:
        await worker.call("drain")
        taken_back = asyncio.create_task(worker.call("cancel_drain"))
        assert (await worker.status())["state"] == "draining"
    finally:
        own_etcd.resume()
    assert (await taken_back)["state"] == "ready"
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0


@pytest.mark.parametrize("lose_data", [pytest.param(False, marks=pytest.mark.full), True])
async def test_a_worker_survives_a_long_outage_of_etcd(host: WorkerHost, own_etcd: RealEtcd, lose_data: bool) -> None:
    worker = await host.start("Counter", DYN_LEASE_TTL_S="1")
    counting = await host.counting(worker, 800)
    await own_etcd.kill()
    await asyncio.sleep(1.5)
    assert (await worker.status())["in_flight"] == 1
    if lose_data:
        own_etcd.wipe()
    await own_etcd.start()
    # A restarted etcd gives an old lease a whole TTL again: what is there may be the old lease, or a new one.
    await worker.registered()
    assert await host.count(3) == [0, 1, 2]
    status = await worker.status()
    assert (status["state"], status["pid"]) == ("ready", worker.pid)
    assert not counting.done()
    assert await counting == list(range(800))
    assert {key.rpartition(":")[2] for key in await host.keys()} == {(await worker.status())["lease"]}


async def test_a_worker_survives_an_outage_of_nats(host: WorkerHost, own_nats: RealNats) -> None:
    worker = await host.start("Counter")
    counting = await host.counting(worker, 100)
    await own_nats.kill()
    assert await counting == list(range(100))
    await own_nats.start()
    assert (await worker.reaches(state="ready"))["pid"] == worker.pid
    assert await host.count(3) == [0, 1, 2]
    assert list(await host.loads()) == [worker.name]


async def generate(host: WorkerHost, lease: str) -> None:
    client = await host.client("VllmWorker", "generate")
    await client.wait_for_instances(5)
    payload = messages.generate_request("r", [300, 301, 302], SamplingParams(max_tokens=2000, ignore_eos=True))
    stream = await client.call(payload, instance_id=int(lease, 16))
    async with contextlib.aclosing(stream):
        async for _ in stream:
            continue


@pytest.mark.timing
async def test_a_dead_engine_ends_its_worker_at_once(host: WorkerHost) -> None:
    config = {"VllmWorker": {"sim": {"fail_after_requests": 2}}}
    worker = await host.start("VllmWorker", target=DISAGG, config=config)
    lease = await worker.registered()
    first = asyncio.create_task(generate(host, lease))
    await worker.reaches(in_flight=1)
    began_s = time.monotonic()
    with pytest.raises(WorkerLost) as second:
        await generate(host, lease)
    assert await worker.exit_code() == 1
    assert time.monotonic() - began_s < 2.0
    with pytest.raises(WorkerLost) as lost:
        await first
    assert (lost.value.retryable, second.value.retryable) == (True, True)
    assert "the engine failed, so this worker ends" in worker.log
    assert "fail_after_requests" in worker.log
    assert "Traceback" not in worker.log
    assert await host.keys() == []
    with pytest.raises(NoWorkers):
        await worker.status()


CONFIG: dict[str, Any] = {
    "Frontend": {"port": 0, "served-model-name": "sim-tiny"},
    "VllmWorker": {"remote-prefill": True, "conditional-disagg": True, "max-local-prefill-length": 10},
}
TOKENS = 900
"""A stream of so many outlasts three drains of its Frontend."""
CHAT = {"model": "sim-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


class Graph:
    """The workers of a disaggregated graph, by short name."""

    def __init__(self, host: WorkerHost) -> None:
        self.host = host
        self.workers: dict[str, WorkerUnderTest] = {}
        self.url = ""

    async def start(self, *names: str, config: dict[str, Any] = CONFIG) -> None:
        for name in names:
            component, _, n = name.partition("_")
            self.workers[name] = await self.host.spawn(component, int(n or 0), target=DISAGG, config=config)
        for worker in self.workers.values():
            await worker.registered()
        self.url = self.host.store.read().frontend_url or ""

        async def served() -> bool:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/health")).status_code == 200

        await self.host.until(served, what="/health is 200")

    def client(self) -> AsyncOpenAI:
        """Without its retries: a test wants to see what happened."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=40.0)


@pytest.fixture
async def graph(etcd_server: RealEtcd, nats_server: RealNats, namespace: str, tmp_path: Path) -> AsyncIterator[Graph]:
    async with worker_host(etcd_server, nats_server, namespace, tmp_path) as host:
        yield Graph(host)


async def test_a_frontend_keeps_its_socket_while_it_drains_and_comes_back(graph: Graph) -> None:
    await graph.start("Frontend", "Processor", "VllmWorker", "PrefillWorker")
    frontend = graph.workers["Frontend"]
    async with graph.client() as openai, httpx.AsyncClient(base_url=graph.url) as http:
        started = asyncio.Event()
        stream = asyncio.create_task(stream_chat(openai, "Go on.", TOKENS, ignore_eos=True, started=started))
        await started.wait()
        load = (await graph.host.loads())[frontend.name]
        assert (load.request_active_slots, load.num_requests_waiting, load.request_total_slots) == (1, 0, 8192)
        (request_id,) = (await frontend.status())["requests"]
        assert request_id in (await graph.workers["VllmWorker"].status())["requests"]
        for _ in range(3):
            frontend.signal(signal.SIGTERM)
            await frontend.reaches(state="draining", lease=None)
            assert (await http.get("/health")).status_code == 503
            refused = await http.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await frontend.call("cancel_drain"))["state"] == "ready"
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert await stream == expected("Go on.", TOKENS, ignore_eos=True)
        frontend.signal(signal.SIGTERM)
        assert await frontend.exit_code() == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/live")


async def test_a_prefill_worker_pulls_again_when_its_drain_is_taken_back(graph: Graph) -> None:
    config = {**CONFIG, "PrefillWorker": {"sim": {"speed": 0.02}}}
    await graph.start("Frontend", "Processor", "VllmWorker", "PrefillWorker", config=config)
    prefill = graph.workers["PrefillWorker"]
    status = await graph.host.client("PrefillWorker", "status")

    async def both_done() -> bool:
        stream = await status.call({})
        (counts,) = [item async for item in stream]
        return int(counts["done"]) == 2

    async with graph.client() as openai:
        prompts = [f"{n} " + "word " * 400 for n in range(2)]
        chats = [asyncio.create_task(stream_chat(openai, prompt, 8)) for prompt in prompts]
        decode = graph.workers["VllmWorker"]
        both = "both are to be prefilled elsewhere"
        assert await graph.host.until(lambda: told(decode, "Remote prefill: True", 2), what=both)
        held = await prefill.reaches(pulled=1)
        assert held["in_flight"] == len(held["requests"]) == 1
        await prefill.call("drain")
        assert (await prefill.reaches(state="draining", lease=None))["pulled"] == 1
        assert (await prefill.call("cancel_drain"))["state"] == "ready"
        assert [await chat for chat in chats] == [expected(prompt, 8) for prompt in prompts]
        await status.wait_for_instances(5)
        assert await graph.host.until(both_done, what="both prefills are counted")
    await prefill.call("drain")
    assert await prefill.exit_code() == 0
    assert "given back" not in prefill.log


async def told(worker: WorkerUnderTest, words: str, times: int) -> bool:
    return worker.log.count(words) == times


async def drained_and_back(worker: WorkerUnderTest, *, by_signal: bool, wait_s: float) -> bool:
    """Whether its drain could be taken back; it cannot where nothing was in flight any more after the linger window."""
    if by_signal:
        worker.signal(signal.SIGTERM)
    else:
        await worker.call("drain")
    try:
        while (await worker.status())["lease"] is not None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(wait_s)
        assert (await worker.call("cancel_drain"))["state"] == "ready"
    except (DrainNotCancellable, NoWorkers):
        assert await worker.exit_code() == 0
        return False
    return True


@pytest.mark.timeout(150)
async def test_no_request_is_lost_while_every_role_drains_and_comes_back(graph: Graph) -> None:
    await graph.start("Frontend", "Processor", "Processor_1", "VllmWorker", "VllmWorker_1", "PrefillWorker")
    answers: list[tuple[str, tuple[str, str | None]]] = []
    going, taken_back = True, 0

    async def load(client: int, openai: AsyncOpenAI) -> None:
        for n in itertools.count():
            if not going:
                return
            prompt = f"Client {client} asks {n}."
            answers.append((prompt, await stream_chat(openai, prompt, 60, ignore_eos=True)))

    async with graph.client() as openai, asyncio.TaskGroup() as group:
        for client in range(6):
            group.create_task(load(client, openai))
        long_prompt = "A long one, please."
        long_one = group.create_task(stream_chat(openai, long_prompt, 700, ignore_eos=True))
        for cycle in range(9):
            name = ("VllmWorker_1", "Processor_1", "PrefillWorker")[cycle % 3]
            # Mostly within the linger window, in which nobody is done; now and then past it.
            wait_s = 0.35 if cycle == 3 else 0.03 * (cycle % 4)
            if await drained_and_back(graph.workers[name], by_signal=cycle % 2 == 1, wait_s=wait_s):
                taken_back += 1
            else:
                await graph.start(name)
        going = False
    assert long_one.result() == expected(long_prompt, 700, ignore_eos=True)
    assert answers == [(prompt, expected(prompt, 60, ignore_eos=True)) for prompt, _ in answers]
    assert (len(answers) > 20, taken_back > 4) == (True, True)


@pytest.mark.full
async def test_the_example_that_revokes_a_lease_drains_a_worker_of_a_served_graph() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2").started() as served:

        def revoke(worker: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "revoke_lease.py", worker],
                cwd=EXAMPLE,
                env=served.env,
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )

        unknown = await asyncio.to_thread(revoke, "Nobody")
        assert (unknown.returncode, "dynamo_VllmWorker_1" in unknown.stderr) == (2, True)
        prompts = ("One.", "Two.", "Three.", "Four.")
        async with streaming(served, *prompts, tokens=300) as streams:
            pid = served.pids()["VllmWorker_1"]
            done = await asyncio.to_thread(revoke, "VllmWorker_1")
            assert done.returncode == 0, done.stderr
            assert "revoked lease" in done.stdout
            await auntil(lambda: served.states().get("VllmWorker_1") == "draining", 3.0, what=served.states)
            for prompt, stream in zip(prompts, streams, strict=True):
                assert await stream == expected(prompt, 300, ignore_eos=True)
        await auntil(lambda: "VllmWorker_1" not in served.pids(), what=served.states)
        assert served.pids().get("VllmWorker") not in (None, pid)
        assert "draining: its lease was revoked" in served.log("VllmWorker_1")
