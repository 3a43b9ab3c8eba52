"""Our side of vLLM's API on the installed version, without an engine: its messages, the graph in EngineCore's place."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.errors import ConfigError, InvalidRequest, NoWorkers, WorkerLost
from dynamo_local.ports import EngineRequest
from dynamo_local.ports import SamplingParams as OurSampling

if not is_installed():
    pytest.skip("vLLM is not installed here", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, on its import
    import numpy as np
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists

    from dynamo_local.engines.vllm import api_server as serving
    from dynamo_local.engines.vllm.api_server import CoreCall, GraphCore, Items
    from dynamo_local.engines.vllm.core_requests import CoreRequests, Wire, is_plain, sampling_of, why_prefilled_here

pytestmark = pytest.mark.vllm


def request(**more: Any) -> EngineCoreRequest:
    """One of vLLM's own; `more` are sampling parameters, but for the request's own fields."""
    own = {name: more.pop(name) for name in ("cache_salt", "lora_request", "prompt_embeds") if name in more}
    fields: dict[str, Any] = {"cache_salt": None, "lora_request": None, **own}
    return EngineCoreRequest(
        request_id="r1",
        prompt_token_ids=[5, 6, 7],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=9, **more),
        pooling_params=None,
        arrival_time=1.0,
        data_parallel_rank=None,
        priority=3,
        **fields,
    )


def test_a_request_arrives_as_it_was_sent():
    sent = request(
        temperature=0.5, seed=7, logprobs=2, structured_outputs=StructuredOutputsParams(regex="a+"), logit_bias={3: 1.0}
    )
    came = Wire().request(Wire().encode(sent))
    assert came.sampling_params == sent.sampling_params
    assert (came.prompt_token_ids, came.priority) == ([5, 6, 7], 3)
    with pytest.raises(InvalidRequest, match="one version"):
        Wire().request([b"\x93\x01\x02\x03"])


def test_an_output_arrives_as_it_was_sent():
    values = np.array([[-0.5, -1.25]], dtype=np.float32)
    logprobs = LogprobsLists(np.array([[40, 41]]), values, np.array([1]))
    sent = EngineCoreOutput("r1", [40], new_logprobs=logprobs, finish_reason=FinishReason.STOP, stop_reason="x")
    came = Wire().output(Wire().encode(sent))
    assert came.new_logprobs is not None
    assert (came.new_logprobs.logprobs == values).all()
    assert (came.finish_reason, came.stop_reason, came.new_token_ids) == (FinishReason.STOP, "x", [40])
    assert not is_plain(sent)
    assert not is_plain(EngineCoreOutput("r1", [], finish_reason=FinishReason.STOP))
    assert is_plain(EngineCoreOutput("r1", [40, 41]))


@pytest.mark.parametrize(
    ("more", "travels"),
    [
        ({}, True),
        ({"logprobs": 3}, True),
        ({"n": 2}, True),
        ({"prompt_logprobs": 1}, False),
        ({"cache_salt": "s"}, False),
    ],
)
def test_what_a_prefill_worker_can_compute_for_others(more: dict[str, Any], travels: bool):
    asked = request(**more)
    assert (why_prefilled_here(asked) is None) == travels
    assert sampling_of(asked).max_tokens == 9


class Graph:
    """Workers that play a script: items that arrive together, or an error."""

    def __init__(self, *script: list[dict[str, Any]] | Exception) -> None:
        self.script = script
        self.calls: list[CoreCall] = []
        self.closed = asyncio.Event()

    async def __call__(self, call: CoreCall) -> AsyncGenerator[Items, None]:
        self.calls.append(call)
        try:
            for step in self.script:
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed.set()


async def outputs_of(graph: Graph) -> list[EngineCoreOutput]:
    core = GraphCore(graph, ["generate"])
    await core.add_request_async(request())
    found: list[EngineCoreOutput] = []
    while not found or found[-1].finish_reason is None:
        found += (await asyncio.wait_for(core.get_output_async(), 5)).outputs
    return found


async def test_tokens_come_with_and_without_words_of_the_engine():
    last = Wire().encode(EngineCoreOutput("theirs", [42], finish_reason=FinishReason.LENGTH))
    graph = Graph([{"token_ids": ()}], [{"token_ids": [40, 41]}], [{"token_ids": [42], "core": last}])
    first, second = await outputs_of(graph)
    assert (first.request_id, first.new_token_ids, second.request_id) == ("r1", [40, 41], "r1")
    assert second.finish_reason is FinishReason.LENGTH
    assert graph.calls[0].token_ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("script", "expected"), [([NoWorkers("none")], NoWorkers), ([[{"token_ids": [40]}]], WorkerLost)]
)
async def test_a_failure_is_told_for_its_request(script: list[Any], expected: type[Exception]):
    core = GraphCore(Graph(*script), ["generate"])
    told: asyncio.Future[tuple[str, Exception]] = asyncio.get_running_loop().create_future()
    core.failed = lambda name, error: told.set_result((name, error))
    await core.add_request_async(request())
    name, error = await asyncio.wait_for(told, 5)
    assert name == "r1"
    assert isinstance(error, expected)


async def test_an_aborted_request_is_cancelled_at_its_worker():
    graph = Graph([{"token_ids": [40]}], *([{"token_ids": [41]}] * 100000))
    core = GraphCore(graph, ["generate"])
    await core.add_request_async(request())
    await asyncio.wait_for(core.get_output_async(), 5)
    await core.abort_requests_async(["r1"])
    await asyncio.wait_for(graph.closed.wait(), 5)


async def test_a_client_may_not_say_where_kv_comes_from():
    graph = Graph()
    with pytest.raises(VLLMValidationError, match="by itself"):
        await GraphCore(graph, []).add_request_async(request(extra_args={"kv_transfer_params": {"remote_host": "x"}}))
    assert not graph.calls


class Llm:
    """The parts of a worker's AsyncLLM that its own requests go through; EngineCore is the test."""

    errored = False

    def __init__(self) -> None:
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.engine_core = self
        self.added: asyncio.Queue[EngineCoreRequest] = asyncio.Queue()
        self.aborted: list[str] = []

    def _run_output_handler(self) -> None:
        """The test calls `process_outputs` itself."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.added.put_nowait(request)

    async def abort(self, request_id: str, internal: bool) -> None:
        self.aborted += self.output_processor.abort_requests([request_id], internal)


def asked(**more: Any) -> EngineRequest:
    return EngineRequest("r1", [5, 6, 7], OurSampling(max_tokens=9), core=Wire().encode(request(**more)))


async def test_a_worker_gives_vllms_outputs_as_they_are():
    """vLLM's own AsyncLLM counts log-probabilities, so it must not see the added ones."""
    llm = Llm()
    subject = CoreRequests(llm)
    params = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 2}
    running = subject.run(asked(logprobs=1, seed=7), "ours", params)
    first = asyncio.ensure_future(anext(running))
    sent = await asyncio.wait_for(llm.added.get(), 5)
    assert (sent.request_id, sent.sampling_params.extra_args) == ("ours", {"kv_transfer_params": params})
    assert (sent.sampling_params.logprobs, sent.sampling_params.seed) == (1, 7)
    logprobs = LogprobsLists(np.array([[40, 41]]), np.array([[-0.5, -1.25]], dtype=np.float32), np.array([1]))
    stats = PrefillStats(num_prompt_tokens=3, num_cached_tokens=3, num_external_cached_tokens=3)
    output = EngineCoreOutput("ours", [40], new_logprobs=logprobs, prefill_stats=stats)
    llm.output_processor.process_outputs([output, EngineCoreOutput("somebody else's", [1])])
    told = await asyncio.wait_for(first, 5)
    came = Wire().output(told.core)
    assert (told.token_ids, came.new_logprobs.logprobs.tolist()) == ((40,), [[-0.5, -1.25]])
    assert (came.prefill_stats.num_cached_tokens, stats.num_cached_tokens) == (2, 3)
    llm.output_processor.process_outputs([EngineCoreOutput("ours", [42], finish_reason=FinishReason.LENGTH)])
    assert [output.finish_reason async for output in running] == ["length"]
    assert not llm.output_processor.has_unfinished_requests()
    assert not llm.aborted


async def test_a_request_that_nobody_wants_any_more_is_aborted():
    llm = Llm()
    running = CoreRequests(llm).run(asked(), "ours", {})
    first = asyncio.ensure_future(anext(running))
    await asyncio.wait_for(llm.added.get(), 5)
    llm.output_processor.process_outputs([EngineCoreOutput("ours", [40])])
    assert (await asyncio.wait_for(first, 5)).core is None
    await running.aclose()
    assert llm.aborted == ["ours"]
    llm.output_processor.process_outputs([EngineCoreOutput("ours", [41])])
    assert not llm.output_processor.has_unfinished_requests()


async def test_a_dead_engine_ends_its_requests():
    """vLLM's own error is what the worker knows."""
    llm = Llm()
    running = CoreRequests(llm).run(asked(), "ours", {})
    first = asyncio.ensure_future(anext(running))
    await asyncio.wait_for(llm.added.get(), 5)
    llm.output_processor.propagate_error(RuntimeError("EngineCore is dead"))
    with pytest.raises(RuntimeError, match="dead"):
        await asyncio.wait_for(first, 5)


def test_options_of_the_api_are_vllms_own():
    config = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    engine = ["--model", "m", "--tensor-parallel-size", "2", "--kv-transfer-config", config]
    args = serving._parsed([*engine, "--tool-call-parser=hermes", "--enable-auto-tool-choice"], 512)
    assert (args.tool_call_parser, args.max_model_len, args.tensor_parallel_size) == ("hermes", 512, 1)
    assert args.kv_transfer_config is None
    with pytest.raises(ConfigError, match="serve-args"):
        serving._parsed([*engine, "--no-such-option", "1"], 512)
