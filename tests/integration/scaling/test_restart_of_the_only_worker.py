"""`dynamo restart` of a component that has one worker: somebody always serves, or it is refused."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.cli.common import ArbiterRefused
from tests.drivers.scaled import command, load, names, settled
from tests.drivers.served import AGG, Served, auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


@pytest.mark.full
async def test_the_only_workers_are_replaced_under_load_and_no_request_is_lost() -> None:
    with Served("--gpus", "sim:2", "--Frontend.ServiceArgs.colocate=[]", target=AGG) as served:
        served.start()
        url, before = served.url, served.pids()
        async with load(served) as streams:
            for component in ("VllmWorker", "Processor", "Frontend"):
                done = await asyncio.to_thread(served.cli, "restart", component, "--wait")
                assert done.returncode == 0, done.stderr
                assert (
                    f"dynamo_{component}_1 is started first, and takes the place of dynamo_{component}" in done.stdout
                )
                await streams.more(12)
        streams.check()

        assert served.url == url
        assert served.pids().keys() == {"Frontend_1", "Processor_1", "VllmWorker_1"}
        assert not set(served.pids().values()) & set(before.values())
        again = await asyncio.to_thread(served.cli, "restart", "VllmWorker", "--wait")
        assert again.returncode == 0, again.stderr
        assert names(served, "VllmWorker") == ["VllmWorker"], "the lowest free name"


@pytest.mark.full
async def test_without_a_spare_gpu_it_is_refused_with_the_reason() -> None:
    with Served("--gpus", "sim:1", target=AGG) as served:
        served.start()
        before = served.pids()
        with pytest.raises(ArbiterRefused, match=r"VllmWorker is the only worker .*too few GPUs.*--force"):
            command(served, "restart", name="VllmWorker")
        assert served.pids() == before

        reply = command(served, "restart", name="VllmWorker", force=True)
        await auntil(lambda: served.pids().get("VllmWorker") not in (None, before["VllmWorker"]), what=served.status)
        await settled(served)
        assert reply["warnings"][0].startswith("dynamo_VllmWorker is the only worker of VllmWorker")
