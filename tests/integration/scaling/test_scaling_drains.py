"""Drains on real processes: how fast a worker is out of routing, what it finishes, what its deadline cuts."""

from __future__ import annotations

import asyncio
import re
import time

import openai
import pytest

from dynamo_local.errors import WorkerDraining, WorkerLost
from dynamo_local.ports import DeleteEvent
from dynamo_local.transport.etcd import EtcdStore
from tests.drivers.endpoint_client import request_plane, without_news
from tests.drivers.scaled import ascale, command, events, load, names, settled, streaming
from tests.drivers.served import AGG, Served, auntil, expected, messages, stream_chat, tokenizer

pytestmark = pytest.mark.infra

LONG_PROMPT = "word " * 400


@pytest.mark.alone
@pytest.mark.timing
@pytest.mark.full
async def test_a_drained_worker_is_out_of_routing_at_once(graph: Served) -> None:
    """From the command to the key's disappearance, as a client of etcd sees it: 50 ms (the best of five: others share
    the machine; `benchmarks.drain` measures p99)."""
    took_s = []
    kv = await graph.etcd()
    gone: dict[str, float] = {}
    watching = asyncio.create_task(_note_deletes(kv, gone))
    try:
        async with streaming(graph, *(f"Stay a while, {n}." for n in range(4)), tokens=2000) as streams:
            for _ in range(5):
                lease = graph.worker("VllmWorker_1")["lease"]
                began_s = time.monotonic()
                await ascale(graph, "VllmWorker", "-1")
                await auntil(lambda lease=lease: lease in gone)
                took_s.append(gone[lease] - began_s)
                await ascale(graph, "VllmWorker", "+1")
                await auntil(lambda: graph.worker("VllmWorker_1")["lease"], what=graph.states)
            alive = not any(stream.done() for stream in streams)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await kv.close()

    assert alive, "the streams ended: there was nothing to drain"
    assert min(took_s) < 0.05, took_s


async def _note_deletes(kv: EtcdStore, gone: dict[str, float]) -> None:
    async for event in kv.watch_prefix("dynamo/components/VllmWorker/"):
        if isinstance(event, DeleteEvent):
            gone.setdefault(event.key.rpartition(":")[2], time.monotonic())


@pytest.mark.full
async def test_requests_that_were_on_their_way_are_served_or_sent_on(graph: Served) -> None:
    ids = tokenizer().encode_chat(messages("Too late?"))
    request = {"request_id": "late", "token_ids": ids, "sampling": {"max_tokens": 4, "ignore_eos": True}}
    where = ("VllmWorker", "generate")
    async with request_plane(graph) as (plane, kv), streaming(graph, "One.", "Two.", "Three.", tokens=250):
        client = await plane.client(kv, graph.namespace, *where)
        await client.wait_for_instances(5.0)
        victim = int(graph.worker("VllmWorker_1")["lease"], 16)
        late = without_news(plane, client, *where)
        scaling = asyncio.create_task(ascale(graph, "VllmWorker", "-1"))
        async with asyncio.timeout(5.0):
            while victim in {i.instance_id for i in client.instances()}:
                await asyncio.sleep(0.001)  # no thread: stragglers are served for a quarter of a second only
        at_once = [item async for item in await late.call(request, instance_id=victim)]
        await scaling
        await asyncio.sleep(0.5)  # twice the time for which stragglers are served
        with pytest.raises((WorkerDraining, WorkerLost)):
            await late.call(request, instance_id=victim)
        sent_on = [await late.call(request) for _ in range(4)]
        answers = [[item async for item in stream] for stream in sent_on]

    tokens = [[token for item in answer for token in item["token_ids"]] for answer in (at_once, *answers)]
    assert tokens[1:] == [tokens[0]] * 4
    assert len(tokens[0]) == 4
    assert victim not in {stream.instance_id for stream in sent_on}


@pytest.mark.full
async def test_a_processor_drains_while_everything_streams_through_it() -> None:
    with Served("--Processor.ServiceArgs.workers=2", target=AGG) as served:
        served.start()
        async with load(served) as streams:
            for _ in range(2):
                assert await ascale(served, "Processor", "-1") == [("drain", "Processor_1")]
                await auntil(lambda: "Processor_1" not in served.states(), what=served.states)
                assert await ascale(served, "Processor", "+1") == [("spawn", "Processor_1")]
                await settled(served)
                await streams.more(6)
        streams.check()


@pytest.mark.full
async def test_a_prefill_worker_drains_with_entries_in_the_queue_and_comes_back() -> None:
    words = ("--PrefillWorker.ServiceArgs.workers=2", '--PrefillWorker.sim={"speed": 0.03}')
    limits = ("--VllmWorker.max-prefill-queue-size=100", "--VllmWorker.prefill-timeout-s=30")
    with Served(*words, *limits) as served:
        served.start()
        before = served.pids()
        prompts = [f"{LONG_PROMPT} and {n}" for n in range(6)]
        async with served.client() as http:
            streams = [asyncio.create_task(stream_chat(http, prompt, 16, ignore_eos=True)) for prompt in prompts]
            await auntil(lambda: (served.status()["prefill_queue"] or {}).get("pending"), what=served.status)
            assert await ascale(served, "PrefillWorker", "-1") == [("drain", "PrefillWorker_1")]
            state = served.states()["PrefillWorker_1"]
            assert await ascale(served, "PrefillWorker", "+1") == [("cancel_drain", "PrefillWorker_1")]
            await auntil(lambda: served.states()["PrefillWorker_1"] == "ready", 2.0, what=served.states)
            pids = served.pids()
            assert await ascale(served, "PrefillWorker", "-1") == [("drain", "PrefillWorker_1")]
            answers = [await stream for stream in streams]
        await auntil(lambda: "PrefillWorker_1" not in served.states(), what=served.states)
        queue = await auntil(lambda: _idle_queue(served), what=lambda: served.status()["prefill_queue"])
        decode_log = served.log("VllmWorker")

    assert state == "draining"
    assert pids == before
    assert answers == [expected(prompt, 16, ignore_eos=True) for prompt in prompts]
    assert queue["dead_letters"] == 0
    assert decode_log.count("Remote prefill: True") == len(prompts)
    assert "prefilled locally" not in decode_log


def _idle_queue(served: Served) -> dict[str, int] | None:
    queue = served.status()["prefill_queue"]
    return queue if queue["outstanding"] == 0 and queue["dead_letters"] is not None else None


@pytest.mark.full
async def test_a_drain_deadline_cuts_what_is_left_and_says_what() -> None:
    words = ("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.ServiceArgs.drain-deadline-s=1")
    with Served(*words) as served:
        served.start()
        prompts = [f"I go on for ever, {n}." for n in range(6)]
        async with streaming(served, *prompts, tokens=50_000) as streams:
            await auntil(lambda: _slots(served, "VllmWorker_1") == 3, what=served.status)
            await ascale(served, "VllmWorker", "-1")
            await auntil(lambda: "VllmWorker_1" not in served.states(), 15.0, what=served.states)
            await auntil(lambda: sum(stream.done() for stream in streams) == 3)
            cut = [stream for stream in streams if stream.done()]
            others = [stream for stream in streams if not stream.done()]
            errors = [stream.exception() for stream in cut]
        notes = " ".join(note["text"] for note in served.status()["notes"])
        passed = next(record for record in events(served) if record["event"] == "DrainDeadlinePassed")

    assert (len(cut), len(others)) == (3, 3)
    assert all(isinstance(error, openai.APIError) for error in errors), errors
    assert passed["requests_cut"] == 3
    cut = r"dynamo_VllmWorker_1 was not gone 1 s after .*; 3 requests were cut: ([\w-]+, ){2}[\w-]+"
    assert re.search(cut, notes), notes


def _slots(served: Served, name: str) -> int | None:
    sample = served.worker(name)["load"]
    return None if sample is None else int(sample["request_active_slots"])


@pytest.mark.full
async def test_a_rolling_restart_needs_no_spare_gpu_and_loses_nothing() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2", "--gpus", "sim:2", target=AGG) as served:
        served.start()
        before, gpus = served.pids(), {name: served.worker(name)["gpus"] for name in names(served, "VllmWorker")}
        fewest = 2
        async with load(served) as streams:
            reply = await asyncio.to_thread(command, served, "restart", name="VllmWorker", rolling=True)
            began_s = time.monotonic()
            while set(served.pids().items()) & {(name, before[name]) for name in gpus} or fewest == 2:
                fewest = min(fewest, len(names(served, "VllmWorker")))
                assert time.monotonic() - began_s < 40.0, served.states()
                await asyncio.sleep(0.02)
            await settled(served)
            await streams.more(12)
        streams.check()
        after = served.pids()

        assert reply["workers"] == ["dynamo_VllmWorker_1", "dynamo_VllmWorker"]
        assert fewest == 1
        assert {name for name in before if before[name] != after[name]} == set(gpus)
        assert {name: served.worker(name)["gpus"] for name in gpus} == gpus
        assert "Faulted" not in {record["event"] for record in events(served)}
