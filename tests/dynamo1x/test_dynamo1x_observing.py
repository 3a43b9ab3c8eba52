"""A planner's observation of Dynamo's own frontend and mockers: requests, every engine's passes, their cards."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.core.types import Role
from dynamo_local.transport.fpm import decode_pass, encode_pass
from tests.drivers.observed import all_seen, counted, observing
from tests.dynamo1x.dynamo_graphs import WAIT_S, ask, graph, instances, listed
from tests.fakes.data_plane.passes import WORKER, passed

pytestmark = [pytest.mark.timeout(500)]

ROLES = {"Frontend": Role.FRONTEND, "Mocker": Role.AGGREGATED}
REQUESTS, TOKENS = 8, 20


@pytest.mark.full
@pytest.mark.parametrize("plane", ["nats", "zmq"])
async def test_requests_passes_and_cards_of_dynamos_workers(plane: str) -> None:
    words = ("--Mocker.ServiceArgs.workers=2", f"--Mocker.ServiceArgs.envs.DYN_EVENT_PLANE={plane}")
    with graph("agg", *words, f"--Frontend.ServiceArgs.envs.DYN_EVENT_PLANE={plane}").started() as served:
        await listed(served)
        async with observing(served, ROLES, runtime="dynamo-1x", counting=True) as (observed, _):
            await all_seen(observed, 2, WAIT_S)
            quiet = await counted(observed, asyncio.get_running_loop().time() + 1.0, WAIT_S)
            async with served.client() as http:
                for n in range(REQUESTS):
                    assert await ask(http, f"the {n}th question", TOKENS) == TOKENS
            traffic = await counted(observed, quiet.at_s, WAIT_S)
            assert (traffic.num_req, traffic.osl) == (REQUESTS, TOKENS)
            assert isinstance(traffic.ttft_ms, float)
            found = await all_seen(observed, 2, WAIT_S)
            passes = [one for seen in found.values() for one in seen.passes]
            assert sum(one.scheduled.num_decode_requests for one in passes) > 0
            assert {engine.worker_id for engine in found} == {
                str(int(key, 16)) for key in map(lease, instances(served))
            }
            can = observed.capabilities()["Mocker"]
            assert can.max_num_seqs is not None
            assert can.max_kv_tokens is not None


@pytest.mark.full
async def test_each_data_parallel_rank_of_a_worker_is_an_engine() -> None:
    command = "--Mocker.command=python -m dynamo.mocker --model-path {model} --model-name tiny --data-parallel-size 2"
    with graph("agg", command).started() as served:
        await listed(served)
        async with observing(served, ROLES, runtime="dynamo-1x", counting=True) as (observed, _):
            async with served.client() as http:
                await asyncio.gather(*(ask(http, f"the {n}th question", TOKENS) for n in range(REQUESTS)))
            found = await all_seen(observed, 2, WAIT_S)
            assert len({engine.worker_id for engine in found}) == 1
            assert {engine.dp_rank for engine in found} == {0, 1}


def test_the_format_of_a_pass_is_dynamos_own() -> None:
    from dynamo.common import forward_pass_metrics as theirs

    ours = passed(4711, rank=1)
    read = theirs.decode(encode_pass(ours))
    assert (read.worker_id, read.dp_rank, read.counter_id, read.wall_time) == (WORKER, 1, 4711, ours.wall_time_s)
    assert read.scheduled_requests.sum_prefill_kv_tokens == ours.scheduled.sum_prefill_kv_tokens
    assert read.queued_requests.var_decode_kv_tokens == ours.queued.var_decode_kv_tokens
    assert theirs.encode(read) == encode_pass(ours)
    assert decode_pass(theirs.encode(read)) == ours


def lease(instance: object) -> str:
    return str(instance).rpartition("/")[2]
