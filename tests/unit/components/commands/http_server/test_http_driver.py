"""The driver against a server in this process: ready, its models, its load, what it holds."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.components.commands.http_server import HttpConfig, HttpDriver, Model
from dynamo_local.components.commands.runner import ChildSilent
from dynamo_local.core.served import ITL, REQUESTS, TOKENS, TTFT
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import ConfigError
from tests.tools.openai_server import KV_BLOCKS, Server


def driver(server: Server, **keys: Any) -> HttpDriver:
    section = {"command": "serve --port {port:http}", "runtime": "http", "role": "aggregated", **keys}
    return HttpDriver(HttpConfig(**section), server.port)


async def test_a_ready_server_has_said_its_models(server: Server) -> None:
    made = driver(server)
    await made.wait_ready()
    assert made.models == (Model("tiny", 4096, 1700000000.0),)
    assert made.calls.streams.bound_if_unsaid == 4096
    await made.close()


async def test_a_name_in_the_section_is_not_asked_for(server: Server) -> None:
    made = driver(server, served_model_name="mine")
    await made.wait_ready()
    assert made.models == (Model("mine", None, 0.0),)
    await made.close()


async def test_a_server_that_is_no_model_server_has_none(server: Server) -> None:
    made = driver(server, role="other")
    await made.wait_ready()
    assert made.models == ()


async def test_a_server_without_models_says_what_to_do(server: Server) -> None:
    server.model = ""
    with pytest.raises(ConfigError, match="served-model-name"):
        await driver(server).wait_ready()


async def test_a_server_that_calls_its_model_otherwise_is_told_the_option(server: Server) -> None:
    await driver(server, must_serve=["tiny"]).wait_ready()
    with pytest.raises(ConfigError, match="--served-model-name small"):
        await driver(server, must_serve=["tiny", "small"]).wait_ready()


async def test_a_server_that_does_not_count_has_the_figures_of_our_connections(server: Server) -> None:
    made = driver(server, metrics=None)
    with made.calls.streams.one(None) as stream:
        for events in (1, 0, 4):
            made.calls.streams.passed(stream, events)
    await made.sample()
    assert (made.served[REQUESTS], made.served[TOKENS]) == (1, 5)
    assert {name.partition(".")[0] for name in made.served} == {REQUESTS, TOKENS, TTFT, ITL}
    await made.close()


async def test_its_load_and_what_it_holds(server: Server) -> None:
    made = driver(server)
    server.running = 4
    sample = await made.sample()
    assert sample.in_flight == 4
    assert sample.load == Load(
        request_active_slots=4, gpu_cache_usage_perc=0.2, kv_total_blocks=KV_BLOCKS, kv_active_blocks=KV_BLOCKS // 5
    )


async def test_a_prefill_server_holds_what_was_not_fetched(server: Server) -> None:
    server.kept = {"a"}
    assert (await driver(server, role="prefill").sample()).in_flight == 1
    assert (await driver(server, role="decode").sample()).in_flight == 0


@pytest.mark.parametrize("without_url", [True, False])
async def test_without_metrics_the_load_is_what_we_hold(server: Server, without_url: bool) -> None:
    server.silent_metrics = True
    made = driver(server, **({"metrics": None} if without_url else {}))
    with made.calls.streams.one(5):
        sample = await made.sample()
    assert not isinstance(sample.load, Missing)
    assert (sample.load.request_active_slots, sample.in_flight) == (1, 1)
    assert isinstance(sample.load.gpu_cache_usage_perc, Missing)
    await made.close()


async def test_a_server_whose_metrics_answer_nothing_good_is_silent(server: Server) -> None:
    with pytest.raises(ChildSilent, match="answers 404"):
        await driver(server, metrics="/nowhere").sample()
