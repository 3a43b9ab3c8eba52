"""Processor, VllmWorker, queue and PrefillWorker in one process: what goes in and what comes out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.components.prefill_worker import PrefillWorker, PrefillWorkerConfig
from dynamo_local.components.processor import Processor, ProcessorConfig
from dynamo_local.components.text.model import TINY_TOKENS
from dynamo_local.components.text.tokenizer import load_tokenizer
from dynamo_local.components.vllm_worker import VllmWorker, VllmWorkerConfig
from dynamo_local.engines.sim.tokens import expected_output
from dynamo_local.engines.sim.transfers import LoopbackTransport
from dynamo_local.errors import InvalidRequest, KvTransferError, NoWorkers, WorkerBusy, WorkerLost
from tests.fakes.data_plane.worker_context import FakeCluster, FakeWorker

TINY = load_tokenizer(None)
FAST = {"speed": 50.0, "num_gpu_blocks": 4096, "block_size": 16}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """Closed at the end: whatever still runs is drained."""
    made = FakeCluster(ack_wait_s=0.3)
    yield made
    await made.close()


async def start_processor(cluster: FakeCluster, **config: Any) -> FakeWorker:
    return await cluster.start(Processor, ProcessorConfig(router="round-robin", **config))


async def start_decode(
    cluster: FakeCluster, remote: bool = False, without: tuple[str, ...] = (), **config: Any
) -> FakeWorker:
    sim = {**FAST, **config.pop("sim", {})}
    return await cluster.start(VllmWorker, VllmWorkerConfig(remote_prefill=remote, sim=sim, **config), without)


async def start_prefill(cluster: FakeCluster, **sim: Any) -> FakeWorker:
    return await cluster.start(PrefillWorker, PrefillWorkerConfig(sim={**FAST, **sim}))


def expected(prompt_ids: list[int], max_tokens: int, **options: Any) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens) of the right answer."""
    low, high = TINY_TOKENS
    ids, reason = expected_output(
        prompt_ids,
        max_tokens=max_tokens,
        stop_token_ids=TINY.eos_token_ids,
        token_low=low,
        token_high=high,
        **options,
    )
    return TINY.decode(ids), reason, len(ids)


async def ask(cluster: FakeCluster, endpoint: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """All response items of one request."""
    stream = await cluster.client("Processor", endpoint).call({"request_id": "r", **body}, timeout_s=20)
    return [item async for item in stream]


def answer(items: list[dict[str, Any]]) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens) of what came."""
    usage = items[-1]["usage"]
    assert usage["completion_tokens"] == sum(item["num_tokens"] for item in items)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [item["finish_reason"] for item in items[:-1]] == [None] * (len(items) - 1)
    return "".join(item["text"] for item in items), items[-1]["finish_reason"], usage["completion_tokens"]


def served_of(worker: FakeWorker) -> Counter[str]:
    """The worker's counters of `core.served`; those of a latency are added up."""
    found: Counter[str] = Counter()
    for name, count in worker.context.served_source().items():
        found[name.partition(".")[0]] += count
    return found


async def ask_many(cluster: FakeCluster, count: int, prompt_tokens: int = 40, max_tokens: int = 24) -> None:
    """`count` different prompts at once; every answer must be exactly right."""

    async def one(n: int) -> None:
        prompt = [3 + (n * 7 + k) % 2000 for k in range(prompt_tokens + n % 50)]
        items = await ask(cluster, prompt=prompt, max_tokens=max_tokens, request_id=f"r{n}")
        assert answer(items) == expected(prompt, max_tokens)

    await asyncio.gather(*(one(n) for n in range(count)))


async def test_chat_streams_the_expected_text(cluster: FakeCluster) -> None:
    decode = await start_decode(cluster)
    await start_processor(cluster)
    messages = [{"role": "user", "content": "hello"}]
    prompt = TINY.encode_chat(messages)
    items = await ask(cluster, "chat/completions", messages=messages, max_tokens=30)
    assert 0 <= items[0].pop("routed_s") < 60
    assert items[0] == {
        "text": "",
        "num_tokens": 0,
        "finish_reason": None,
        "usage": None,
        "prompt_tokens": len(prompt),
    }
    assert answer(items) == expected(prompt, 30)
    assert items[-1]["usage"]["prompt_tokens"] == len(prompt)
    assert items[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    tokens = items[-1]["usage"]["completion_tokens"]
    served = served_of(decode)
    assert (served["requests"], served["tokens"], served["ttft"]) == (1, tokens, 1)


async def test_200_concurrent_aggregated_requests_are_all_right(cluster: FakeCluster) -> None:
    for _ in range(2):
        await start_decode(cluster)
    await start_processor(cluster)
    await ask_many(cluster, 200)
    used = {call.instance_id for call in cluster.client("VllmWorker", "generate").calls}
    assert used == {1, 2}


async def test_200_concurrent_disaggregated_requests_are_all_right(cluster: FakeCluster) -> None:
    prefill = await start_prefill(cluster)
    await start_decode(cluster, remote=True)
    await start_processor(cluster)
    await ask_many(cluster, 200)
    assert (await prefill.instance.status())["done"] == 200
    assert served_of(prefill)["requests"] == 200
    await prefill.drain()  # what is acked last is acked after the reply
    assert not cluster.queue_server.entries


async def test_conditional_disagg_sends_only_long_prompts_away(cluster: FakeCluster) -> None:
    prefill = await start_prefill(cluster)
    await start_decode(cluster, remote=True, conditional_disagg=True, max_local_prefill_length=50)
    await start_processor(cluster)
    for length, remote in ((50, 0), (51, 1)):
        prompt = [length, *range(300, 299 + length)]
        assert answer(await ask(cluster, prompt=prompt, max_tokens=5)) == expected(prompt, 5)
        assert (await prefill.instance.status())["done"] == remote
    await cluster.kv.put("dynamo/disagg_router/sim-tiny", b'{"max_local_prefill_length": 200}')
    await asyncio.sleep(0.05)
    prompt = [7, *range(400, 499)]
    assert answer(await ask(cluster, prompt=prompt, max_tokens=5)) == expected(prompt, 5)
    assert (await prefill.instance.status())["done"] == 1


async def test_prefill_worker_death_is_a_pause_not_an_error(cluster: FakeCluster) -> None:
    """Entries in the hands of a killed prefill worker are redelivered, no request is lost."""
    slow = await start_prefill(cluster, speed=0.02)
    await start_decode(cluster, remote=True)
    await start_processor(cluster)
    asked = asyncio.create_task(ask_many(cluster, 20, prompt_tokens=400, max_tokens=8))
    while not (await slow.instance.status())["computing"]:
        await asyncio.sleep(0.01)
    await slow.kill()
    healthy = await start_prefill(cluster)
    await asked
    assert (await healthy.instance.status())["done"] > 0


async def test_past_its_deadline_a_prefill_is_local(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """A registered prefill worker that does not come to it: after the deadline the request is served all the same."""
    await start_prefill(cluster, speed=0.001)
    await start_decode(cluster, remote=True, prefill_timeout_s=0.2)
    await start_processor(cluster)
    prompt = list(range(300, 900))
    assert answer(await ask(cluster, prompt=prompt, max_tokens=5)) == expected(prompt, 5)
    assert "no prefill of" in caplog.text
    for worker in cluster.workers:  # it would drain for a minute of real time
        if worker.context.component == "PrefillWorker":
            await worker.kill()


async def test_without_a_prefill_worker_everything_is_local(cluster: FakeCluster) -> None:
    await start_decode(cluster, remote=True)
    await start_processor(cluster)
    await ask_many(cluster, 20)
    assert not cluster.queue_server.seen


async def test_remote_prefill_in_an_aggregated_graph_is_said_and_does_nothing(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await start_decode(cluster, remote=True, without=("PrefillWorker",))
    await start_processor(cluster)
    await ask_many(cluster, 3)
    assert "the graph has no prefill worker" in caplog.text


async def test_without_nats_the_prefill_is_local(cluster: FakeCluster) -> None:
    prefill = await start_prefill(cluster)
    await start_decode(cluster, remote=True)
    await start_processor(cluster)
    cluster.queue_server.available = False
    await ask_many(cluster, 10)
    cluster.queue_server.available = True
    assert (await prefill.instance.status())["done"] == 0


async def test_kv_that_cannot_be_pulled_is_computed_locally(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await start_prefill(cluster)
    await start_decode(cluster, remote=True)
    await start_processor(cluster)

    async def gone(*_where: object) -> None:
        raise KvTransferError("the connection broke")

    monkeypatch.setattr(LoopbackTransport, "pull", gone)
    prompt = list(range(300, 400))
    assert answer(await ask(cluster, prompt=prompt, max_tokens=6)) == expected(prompt, 6)
    assert "its KV did not arrive" in caplog.text
    await prefill.kill()


async def test_client_that_leaves_cancels_its_entry_and_its_request(cluster: FakeCluster) -> None:
    prefill = await start_prefill(cluster, speed=0.001)
    decode = await start_decode(cluster, remote=True)
    await start_processor(cluster)
    client = cluster.client("Processor", "completions")
    streams = [
        await client.call({"prompt": list(range(300 + n, 900 + n)), "max_tokens": 50}, timeout_s=20) for n in range(4)
    ]
    while len(cluster.queue_server.entries) < 4 or not (await prefill.instance.status())["computing"]:
        await asyncio.sleep(0.01)
    for stream in streams:
        await stream.aclose()
    await decode.drain()
    assert not cluster.queue_server.entries
    await prefill.kill()


async def test_closing_a_decoding_stream_frees_the_engine(cluster: FakeCluster) -> None:
    worker = await start_decode(cluster, sim={"speed": 1.0})
    await start_processor(cluster)
    stream = await cluster.client("Processor", "completions").call(
        {"prompt": [300, 301], "max_tokens": 5000, "ignore_eos": True}, timeout_s=20
    )
    received = 0
    async for item in stream:
        received += item["num_tokens"]
        if received:
            break
    await stream.aclose()
    assert worker.context.load_source is not None
    assert worker.context.load_source().request_active_slots == 0


async def test_a_drain_lets_everything_finish(cluster: FakeCluster) -> None:
    """Prefill and decode workers asked to leave finish all that they have begun."""
    prefill = await start_prefill(cluster)
    spare = await start_prefill(cluster)
    decode = await start_decode(cluster, remote=True)
    await start_processor(cluster)
    asked = asyncio.create_task(ask_many(cluster, 40, prompt_tokens=300, max_tokens=40))
    while not (await prefill.instance.status())["computing"]:
        await asyncio.sleep(0)
    await asyncio.gather(prefill.drain(), decode.drain())
    await asked
    assert (await spare.instance.status())["done"] > 0


async def test_full_workers_are_busy_with_a_hint(cluster: FakeCluster) -> None:
    await start_decode(cluster, max_num_waiting=1, sim={"speed": 0.01, "max_num_seqs": 1})
    await start_processor(cluster)
    client = cluster.client("Processor", "completions")
    streams = []

    async def ask_one_more() -> None:
        stream = await client.call({"prompt": list(range(300, 340)), "max_tokens": 5}, timeout_s=20)
        streams.append(stream)
        assert (await anext(aiter(stream)))["num_tokens"] == 0  # taken
        await asyncio.sleep(0.05)  # the engine's pass begins

    await ask_one_more()
    await ask_one_more()
    with pytest.raises(WorkerBusy) as caught:
        await ask_one_more()
    assert caught.value.details["retry_after_s"] == 1.0
    assert len(streams) == 3
    for stream in streams:
        await stream.aclose()


async def test_lost_worker_before_the_first_token_is_not_the_clients_matter(cluster: FakeCluster) -> None:
    doomed = await start_decode(cluster, sim={"speed": 0.001})
    await start_processor(cluster)
    prompt = list(range(300, 400))
    asked = asyncio.create_task(ask(cluster, prompt=prompt, max_tokens=6))
    while not doomed.context.load_source().request_active_slots:  # type: ignore[misc]
        await asyncio.sleep(0.01)
    await start_decode(cluster)
    await doomed.kill()
    assert answer(await asked) == expected(prompt, 6)


async def killed_amid_tokens(cluster: FakeCluster, doomed: FakeWorker, **body: Any) -> list[dict[str, Any]]:
    """All items of an answer whose worker is lost after the first token."""
    stream = await cluster.client("Processor", "completions").call({"request_id": "r", **body}, timeout_s=20)
    items = aiter(stream)
    found = [await anext(items)]
    while not found[-1]["num_tokens"]:
        found.append(await anext(items))
    await doomed.kill()
    return found + [item async for item in items]


async def test_lost_worker_amid_tokens_is_a_clear_error_without_migrations(cluster: FakeCluster) -> None:
    worker = await start_decode(cluster, sim={"speed": 1.0})
    await start_processor(cluster, migration_limit=0)
    with pytest.raises(WorkerLost):
        await killed_amid_tokens(cluster, worker, prompt=[300, 301], max_tokens=5000, ignore_eos=True)


@pytest.mark.parametrize("remote", [False, True], ids=["prefilled locally", "prefilled remotely"])
@pytest.mark.parametrize(
    "options", [{"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 90}, {"seed": 5}], ids=["", "min", "seed"]
)
async def test_an_answer_goes_on_at_another_worker(cluster: FakeCluster, remote: bool, options: Any) -> None:
    doomed = await start_decode(cluster, remote, sim={"speed": 2.0})
    if remote:
        await start_prefill(cluster)
    await start_processor(cluster)
    body = {"prompt": list(range(300, 340)), "max_tokens": 120, **options}
    undisturbed = answer(await ask(cluster, **body))
    asked = asyncio.create_task(killed_amid_tokens(cluster, doomed, **body))
    await start_decode(cluster, remote)
    items = await asked
    assert answer(items) == undisturbed
    assert [item["migrations"] for item in items if "migrations" in item] == [1]
    assert items[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] <= 40


async def test_an_answer_of_which_only_the_end_is_lost_is_complete(cluster: FakeCluster) -> None:
    async def without_end(_payload: Any, _context: Any) -> AsyncIterator[Any]:
        yield {"token_ids": []}
        yield {"token_ids": [400, 401], "finish_reason": "stop"}
        raise WorkerLost("gone")

    await start_decode(cluster)
    await start_processor(cluster)
    workers = cluster.client("VllmWorker", "generate")
    workers.add_instance(workers.instances()[0].instance_id, without_end)
    assert answer(await ask(cluster, prompt=[300], max_tokens=9)) == (TINY.decode([400, 401]), "stop", 2)
    assert len(workers.calls) == 1


async def test_stop_string_ends_the_request_in_the_engine(cluster: FakeCluster) -> None:
    worker = await start_decode(cluster)
    await start_processor(cluster)
    prompt = list(range(300, 320))
    text, _, _ = expected(prompt, 200, ignore_eos=True)
    stop = text[60:64]
    items = await ask(cluster, prompt=prompt, max_tokens=200, ignore_eos=True, stop=[stop])
    got, reason, tokens = answer(items)
    assert (got, reason) == (text[: text.find(stop)], "stop")
    assert tokens < 200
    assert worker.context.load_source().request_active_slots == 0  # type: ignore[misc]


async def test_repeated_prompt_reports_cached_tokens(cluster: FakeCluster) -> None:
    await start_decode(cluster)
    await start_processor(cluster)
    prompt = list(range(300, 400))
    first, second = [await ask(cluster, prompt=prompt, max_tokens=4) for _ in range(2)]
    assert first[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_over_long_prompts_ask_no_worker(cluster: FakeCluster) -> None:
    await start_decode(cluster, max_model_len=64)
    await start_processor(cluster)
    with pytest.raises(InvalidRequest) as caught:
        await ask(cluster, prompt=list(range(300, 364)))
    assert caught.value.details["param"] == "prompt"
    assert cluster.client("VllmWorker", "generate").calls == []


async def test_no_worker_or_another_model_is_named(cluster: FakeCluster) -> None:
    await start_processor(cluster)
    await start_decode(cluster, served_model_name="other")
    with pytest.raises(NoWorkers, match="served now: other"):
        await ask(cluster, prompt=[300])


async def test_model_card_comes_with_the_worker_and_goes_with_it(cluster: FakeCluster) -> None:
    worker = await start_decode(cluster, served_model_name="tiny", max_model_len=512)
    found, _ = await cluster.kv.get_prefix("dynamo/models/")
    assert [kv.key for kv in found] == ["dynamo/models/tiny:1"]
    assert b'"max_model_len":512' in found[0].value
    await worker.drain()
    assert (await cluster.kv.get_prefix("dynamo/models/"))[0] == []


async def test_prefill_worker_shows_its_state(cluster: FakeCluster) -> None:
    worker = await start_prefill(cluster)
    stream = await cluster.client("PrefillWorker", "status").call({})
    (status,) = [item async for item in stream]
    assert (status["state"], status["in_hand"], status["done"]) == ("ready", 0, 0)
    assert worker.context.load_source().kv_total_blocks == 4096  # type: ignore[misc]
