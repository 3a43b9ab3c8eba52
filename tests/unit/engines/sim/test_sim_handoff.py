"""KV from a prefill engine to a decode engine: identity, time, leases, death. In memory and over real loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.components.handoffs import dropped
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.tokens import expected_tokens, prompt_digest
from dynamo_local.engines.sim.transfers import (
    InMemoryTransport,
    KvListener,
    KvSource,
    LoopbackTransport,
    PullRequest,
    pull_request_of,
)
from dynamo_local.errors import KvTransferError
from dynamo_local.ports import EngineOutput, EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import FixedModel

PERF = FixedModel(prefill_ms_per_token=1, decode_ms=10)
PROMPT = list(range(30))
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
# 30 tokens of 1,000 bytes over 100,000 bytes/s, and 0.1 s: a pull of PROMPT takes 0.4 s.
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks": 250,
    "kv_bytes_per_token": 1000,
    "kv_transfer_bytes_per_s": 1e5,
    "kv_transfer_latency_s": 0.1,
}


async def collect(of: SimEngine, prompt: list[int], params: Mapping[str, Any] | None, n: int = 6) -> list[EngineOutput]:
    sampling = SamplingParams(n, ignore_eos=True)
    return [output async for output in of.generate(EngineRequest("r", prompt, sampling, params))]


async def prefill(of: SimEngine, prompt: list[int]) -> dict[str, Any]:
    """What the prefill engine answers with, as it would come off the wire."""
    outputs = await collect(of, prompt, ASK, 1)
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(prompt, 1)
    assert outputs[-1].finish_reason == "length"
    params: dict[str, Any] = json.loads(json.dumps(outputs[-1].kv_transfer_params))
    return params


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


Body = Callable[[SimEngine, SimEngine], Awaitable[None]]


def virtual(body: Body, **options: Any) -> None:
    """A prefill and a decode engine in virtual time."""

    async def main() -> None:
        transport = InMemoryTransport()
        pair = [SimEngine(SimOptions(**OPTIONS, **options), transport=transport, perf_model=PERF) for _ in range(2)]
        for each in pair:
            await each.start()
        await body(*pair)
        for each in pair:
            await each.close()

    run_virtual(main())


def test_a_decode_from_remote_kv_equals_the_aggregated_output() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        clock = AsyncioClock()
        params = await prefill(p, PROMPT)
        assert p.load().kv_active_blocks == 8
        assert clock.now_s() == pytest.approx(0.030)
        outputs = await collect(d, PROMPT, params)
        assert tokens_of(outputs) == expected_tokens(PROMPT, 6)
        assert clock.now_s() == pytest.approx(0.030 + 0.4 + 6 * 0.010)
        await p.wait_handoffs()
        assert p.load().kv_active_blocks == d.load().kv_active_blocks == 0
        assert d.prefix_hit_rate(PROMPT) > 0.9

    virtual(body)


def test_the_hand_off_has_the_shape_of_vllms_nixl_connector() -> None:
    """The names that a decode engine of vLLM takes."""

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        assert params["do_remote_prefill"] is True
        assert params["do_remote_decode"] is False
        assert params["remote_engine_id"] == p.info.engine_id != d.info.engine_id
        assert len(params["remote_block_ids"]) == 8
        assert set(params) == {
            "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids",
            "remote_request_id", "remote_host", "remote_port", "tp_size",
        }  # fmt: skip

    virtual(body)


def test_what_the_decode_engine_has_cached_is_not_pulled_again() -> None:
    """28 of 30 tokens are there: 2 tokens and the latency are 0.12 s, not 0.4 s. The blocks are freed all the same."""

    async def body(p: SimEngine, d: SimEngine) -> None:
        await collect(d, PROMPT, None)
        params = await prefill(p, PROMPT)
        started_s = AsyncioClock().now_s()
        outputs = await collect(d, PROMPT, params)
        assert AsyncioClock().now_s() - started_s == pytest.approx(0.12 + 6 * 0.010)
        assert outputs[0].num_cached_tokens == 28
        assert p.load().kv_active_blocks == 0

    virtual(body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remote_request_id": None}, "lack remote_request_id"),
        ({"remote_engine_id": None, "remote_port": "1"}, "lack remote_engine_id, remote_port"),
        ({"remote_request_id": "another"}, "not held here"),
        ({"remote_engine_id": "another"}, "is of engine another"),
        ({"remote_port": 99}, "nothing listens there"),
    ],
)
def test_a_decode_without_the_right_identity_is_an_error(change: dict[str, Any], message: str) -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        with pytest.raises(KvTransferError, match=message):
            await collect(d, PROMPT, {**params, **change})
        assert d.load().kv_active_blocks == 0
        assert tokens_of(await collect(d, PROMPT, params)) == expected_tokens(PROMPT, 6)

    virtual(body)


def test_kv_of_another_prompt_is_an_error() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        with pytest.raises(KvTransferError, match="another prompt"):
            await collect(d, [*PROMPT[:-1], 999], params)
        assert p.num_held == 1

    virtual(body)


def test_kv_can_be_pulled_once_and_only_within_its_lease() -> None:
    """vLLM would answer 200 with invalid KV after the lease; here it is an error that says so."""

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        await collect(d, PROMPT, params)
        with pytest.raises(KvTransferError, match="not held here"):
            await collect(d, PROMPT, params)
        late = await prefill(p, [5, *PROMPT])
        await asyncio.sleep(31)
        assert p.load().kv_active_blocks == 0
        with pytest.raises(KvTransferError, match="its lease of 30 s is over"):
            await collect(d, [5, *PROMPT], late)

    virtual(body)


def test_waiting_for_hand_offs_ends_with_the_pull_or_the_lease() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        clock = AsyncioClock()
        await p.wait_handoffs()
        assert clock.now_s() == 0
        params = await prefill(p, PROMPT)
        pulled = asyncio.create_task(collect(d, PROMPT, params))
        await p.wait_handoffs()
        assert clock.now_s() == pytest.approx(0.43)
        await pulled
        await prefill(p, [5, *PROMPT])
        held_at_s = clock.now_s()
        await p.wait_handoffs()
        assert clock.now_s() == pytest.approx(held_at_s + 30)

    virtual(body)


def test_a_pull_in_progress_outlives_the_lease() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        assert tokens_of(await collect(d, PROMPT, params)) == expected_tokens(PROMPT, 6)

    virtual(body, kv_lease_duration_s=0.2)


def test_a_decode_that_is_aborted_in_mid_pull_gives_everything_back() -> None:
    """Its own blocks at once; and it tells the prefill engine, as vLLM's connector does: nothing waits for a lease."""

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        task = asyncio.create_task(collect(d, PROMPT, params))
        await asyncio.sleep(0.2)
        assert (d.load().num_requests_waiting, d.load().kv_active_blocks) == (1, 8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (d.load().num_requests_waiting, d.load().kv_active_blocks) == (0, 0)
        aborted_s = AsyncioClock().now_s()
        await p.wait_handoffs()
        assert AsyncioClock().now_s() == aborted_s
        assert p.load().kv_active_blocks == 0

    virtual(body)


def test_an_engine_that_closes_tells_first_which_kv_it_does_not_want() -> None:
    """Four of 48 `down`s waited for the lease of KV whose decode worker had left."""

    class FarTransport(InMemoryTransport):
        async def pull(self, host: str, port: int, request: PullRequest) -> None:
            await asyncio.sleep(0.1)
            await super().pull(host, port, request)

    async def main() -> None:
        transport = FarTransport()
        p, d = (SimEngine(SimOptions(**OPTIONS), transport=transport, perf_model=PERF) for _ in range(2))
        await p.start()
        await d.start()
        params = await prefill(p, PROMPT)
        task = asyncio.create_task(collect(d, PROMPT, params))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        closed_s = AsyncioClock().now_s()
        await d.close()
        await p.wait_handoffs()
        await p.close()
        assert AsyncioClock().now_s() == pytest.approx(closed_s + 0.1)

    run_virtual(main())


def test_kv_that_is_dropped_is_free_at_once() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        await dropped(d, EngineRequest("r", PROMPT, SamplingParams(500)), params)
        assert (p.num_held, d.load().kv_active_blocks) == (0, 0)

    virtual(body)


def test_a_hand_off_that_is_released_is_not_waited_for() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        p.release_handoff({**params, "remote_request_id": "another"})
        assert p.num_held == 1
        p.release_handoff(params)
        assert (p.num_held, p.load().kv_active_blocks) == (0, 0)
        with pytest.raises(KvTransferError, match="not held here"):
            await collect(d, PROMPT, params)

    virtual(body)


def test_a_hand_off_that_nobody_heard_of_is_freed_at_once() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        stream = p.generate(EngineRequest("r", PROMPT, SamplingParams(1), ASK))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        await asyncio.sleep(1)
        assert p.load().kv_active_blocks == 0
        assert p.num_held == 0

    virtual(body)


def test_a_pull_has_a_deadline() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        with pytest.raises(KvTransferError, match=r"was not pulled within 0\.3 s"):
            await collect(d, PROMPT, params)
        assert d.load().kv_active_blocks == 0

    virtual(body, kv_pull_timeout_s=0.3)


def test_an_engine_closed_in_mid_pull_is_an_error_for_the_other() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        task = asyncio.create_task(collect(d, PROMPT, params))
        await asyncio.sleep(0.2)
        await p.close()
        with pytest.raises(KvTransferError, match="was closed"):
            await task

    virtual(body)


def test_other_passes_go_on_during_a_pull() -> None:

    async def body(p: SimEngine, d: SimEngine) -> None:
        params = await prefill(p, PROMPT)
        pulling = asyncio.create_task(collect(d, PROMPT, params))
        other = await collect(d, [1, 2, 3], None, 20)
        assert len(tokens_of(other)) == 20
        assert not pulling.done()
        assert tokens_of(await pulling) == expected_tokens(PROMPT, 6)

    virtual(body)


# --- over real loopback -------------------------------------------------------------------------


class WatchedTransport(LoopbackTransport):
    """Says when a pull is being served, and when it no longer is."""

    def __init__(self) -> None:
        super().__init__()
        self.serving, self.ended = asyncio.Event(), asyncio.Event()

    async def serve(self, source: KvSource) -> KvListener:
        return await super().serve(WatchedSource(source, self))


class WatchedSource:
    """The engine behind a `WatchedTransport`."""

    def __init__(self, source: KvSource, transport: WatchedTransport) -> None:
        self._source, self._transport = source, transport

    async def serve_pull(self, pull: PullRequest) -> None:
        self._transport.serving.set()
        try:
            await self._source.serve_pull(pull)
        finally:
            self._transport.ended.set()


async def started(transport: LoopbackTransport | None = None, **options: Any) -> SimEngine:
    """A fast engine with its own side channel."""
    fast = {**OPTIONS, "kv_transfer_latency_s": 0.02, "kv_transfer_bytes_per_s": 1e9, **options}
    sim = SimEngine(SimOptions(**fast), transport=transport or LoopbackTransport(), perf_model=FixedModel(decode_ms=1))
    await sim.start()
    return sim


async def test_a_hand_off_over_loopback() -> None:
    p, d = await started(), await started()
    params = await prefill(p, PROMPT)
    assert params["remote_host"] == "127.0.0.1"
    with pytest.raises(KvTransferError, match="another prompt"):
        await collect(d, [7, *PROMPT], params)
    assert tokens_of(await collect(d, PROMPT, params)) == expected_tokens(PROMPT, 6)
    await asyncio.wait_for(p.wait_handoffs(), 5)
    await d.close()
    await p.close()


async def test_a_dead_prefill_engine_is_noticed_at_once_over_loopback() -> None:
    side = WatchedTransport()
    p, d = await started(side, kv_transfer_latency_s=60.0), await started()
    params = await prefill(p, PROMPT)
    task = asyncio.create_task(collect(d, PROMPT, params))
    await side.serving.wait()
    await p.close()
    async with asyncio.timeout(2):
        with pytest.raises(KvTransferError, match="does not answer"):
            await task
        with pytest.raises(KvTransferError, match="does not answer"):
            await collect(d, PROMPT, params)
    assert d.load().kv_active_blocks == 0
    await d.close()


async def test_a_decode_engine_that_goes_away_over_loopback_leaves_the_lease() -> None:
    side = WatchedTransport()
    p, d = await started(side, kv_transfer_latency_s=0.2), await started()
    params = await prefill(p, PROMPT)
    pull = pull_request_of(params, "r", prompt_digest(PROMPT, seed=p.options.seed))
    task = asyncio.create_task(LoopbackTransport().pull(params["remote_host"], params["remote_port"], pull))
    await side.serving.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await side.ended.wait()
    assert tokens_of(await collect(d, PROMPT, params)) == expected_tokens(PROMPT, 6)
    await d.close()
    await p.close()


async def test_a_stranger_on_the_side_channel_is_answered_with_an_error() -> None:
    p = await started()
    assert p.info.handoff_address is not None
    reader, writer = await asyncio.open_connection(*p.info.handoff_address)
    writer.write(b"GET / HTTP/1.1\r\n")
    assert json.loads(await reader.readline())["error"]["code"] == "kv_transfer"
    writer.close()
    await writer.wait_closed()
    reader, writer = await asyncio.open_connection(*p.info.handoff_address)
    await p.close()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
