"""The shell around AsyncLLM, with an AsyncLLM that plays from a script; no vLLM needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_local.core.routing.disagg import ASK_PREFILL
from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.launcher import CoreProcesses
from dynamo_local.engines.vllm.options import VllmOptions
from dynamo_local.errors import EngineDead, EngineError, InvalidRequest, KvTransferError
from dynamo_local.ports import EngineOutput, EngineRequest, SamplingParams

PULL = {"do_remote_prefill": True, "remote_engine_id": "p1", "remote_host": "127.0.0.1", "remote_port": 20000}

Make = Callable[..., Awaitable[tuple["VllmEngine", "FakeLlm"]]]


class EngineDeadError(Exception):
    """vLLM's."""


class EngineGenerateError(Exception):
    """vLLM's."""


class FakeLlm:
    """Yields what its script says; a `None` waits for ever, an exception is raised."""

    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="me", kv_connector_extra_config=None),
        model_config=SimpleNamespace(max_model_len=100),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=10),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=512),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.asked: list[tuple[Any, Any, str]] = []
        self.aborted: list[str] = []
        self.ended = False
        self.record: Callable[[Any, Any], None] | None = None
        """What is called after each pass."""

    def from_vllm_config(self, config: Any, *, stat_loggers: list[Any], **_options: Any) -> FakeLlm:
        """The script was there before the engine was asked for."""
        assert config is self.vllm_config
        (self.record,) = stat_loggers
        return self

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What this model can do."""
        return ("generate",)

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, trace_headers: Any = None
    ) -> AsyncGenerator[Any, None]:
        self.asked.append((prompt, sampling, request_id))
        try:
            for step in self.script:
                if step is None:
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    def shutdown(self, timeout: float) -> None:
        """It has no process."""
        self.ended = True


class NoProcesses(CoreProcesses):
    """Belongs to a fake."""

    def watch(self, die: Callable[[str], None]) -> None:
        """There are none."""


def fake_vllm(llm: FakeLlm) -> dict[str, Any]:
    """Its modules, as far as an engine imports them, and ours that need more of it."""
    asked = SimpleNamespace(
        create_engine_config=lambda _context: llm.vllm_config, enable_log_requests=False, disable_log_stats=False
    )
    return {
        "vllm": SimpleNamespace(
            __spec__=ModuleSpec("vllm", None, origin="a fake"), SamplingParams=SimpleNamespace, __version__="0.fake"
        ),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta")),
        "vllm.usage": SimpleNamespace(),
        "vllm.usage.usage_lib": SimpleNamespace(UsageContext=SimpleNamespace(ENGINE_CONTEXT="engine")),
        "vllm.v1": SimpleNamespace(),
        "vllm.v1.engine": SimpleNamespace(),
        "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=llm),
        "vllm.v1.engine.exceptions": SimpleNamespace(
            EngineDeadError=EngineDeadError, EngineGenerateError=EngineGenerateError
        ),
        "dynamo_local.engines.vllm.arguments": SimpleNamespace(
            engine_args=lambda _words: asked, stat_logger=lambda record: record
        ),
    }


def output(*tokens: int, reason: str | None = None, params: dict[str, Any] | None = None) -> Any:
    completion = SimpleNamespace(token_ids=list(tokens), finish_reason=reason)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=0, kv_transfer_params=params)


@pytest.fixture
async def engine_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Make]:
    """Start an engine over a script; its end is part of each test."""
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)})  # an engine adds to it
    made: list[tuple[VllmEngine, FakeLlm]] = []

    async def make(*script: Any, timeout_s: float = 5.0) -> tuple[VllmEngine, FakeLlm]:
        llm = FakeLlm(list(script))
        for name, module in fake_vllm(llm).items():
            monkeypatch.setitem(sys.modules, name, module)
        options = VllmOptions("m", transfer="consumer", kv_pull_timeout_s=timeout_s)
        engine = VllmEngine(options, name="unit", processes=NoProcesses)
        made.append((engine, llm))
        await engine.start()
        return engine, llm

    yield make
    for engine, llm in made:
        await engine.close()
        assert llm.ended


async def collect(engine: VllmEngine, params: dict[str, Any] | None = None, **sampling: Any) -> list[EngineOutput]:
    asked = EngineRequest("r", (1, 2, 3), SamplingParams(5, **sampling), params)
    async with asyncio.timeout(5.0):
        return [item async for item in engine.generate(asked)]


async def test_outputs_are_passed_on_as_they_come(engine_of: Make) -> None:
    """vLLM's deltas are ours; two requests of one id have different ids inside."""
    engine, llm = await engine_of(output(7), output(8, 9, reason="length"))
    assert [(o.token_ids, o.finish_reason) for o in await collect(engine)] == [((7,), None), ((8, 9), "length")]
    await collect(engine)
    assert llm.asked[0][0] == {"type": "token", "prompt_token_ids": [1, 2, 3]}
    assert len({request_id for _, _, request_id in llm.asked}) == 2
    assert engine.load().num_requests_waiting == engine.load().remaining_tokens == 0


async def test_kv_that_does_not_come_ends_at_the_deadline(engine_of: Make) -> None:
    """The request is aborted, so that vLLM gives its blocks back, and tells the other side to."""
    engine, llm = await engine_of(None, timeout_s=0.05)
    with pytest.raises(KvTransferError, match=r"r was not pulled from engine p1 at 127.0.0.1:20000: .* within 0.05 s"):
        await collect(engine, PULL)
    assert len(llm.aborted) == 1


async def test_the_deadline_is_over_with_the_first_token(engine_of: Make) -> None:
    engine, llm = await engine_of(output(7), None, timeout_s=0.05)
    asked = EngineRequest("r", (1, 2, 3), SamplingParams(5), PULL)
    async with contextlib.aclosing(cast(AsyncGenerator[EngineOutput, None], engine.generate(asked))) as stream:
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(stream)
    assert len(llm.aborted) == 1


@pytest.mark.parametrize(
    ("params", "script", "error"),
    [
        (PULL, [output(reason="error")], KvTransferError),
        (PULL, [output(7), output(reason="error")], EngineError),
        (None, [output(reason="error")], EngineError),
        (None, [ValueError("temperature is wrong")], InvalidRequest),
        (None, [EngineDeadError("died")], EngineDead),
        (None, [RuntimeError("boom")], EngineError),
    ],
    ids=["KV not loaded", "later", "any", "bad value", "dead", "boom"],
)
async def test_each_failure_has_its_error(
    engine_of: Make, params: Any, script: list[Any], error: type[Exception]
) -> None:
    engine, _ = await engine_of(*script)
    with pytest.raises(error) as caught:
        await collect(engine, params)
    assert type(caught.value) is error


async def test_an_engine_that_died_is_told_to_whoever_waits(engine_of: Make) -> None:
    engine, _ = await engine_of(EngineDeadError("EngineCore is dead"))
    waiting = asyncio.ensure_future(engine.wait_failed())
    with pytest.raises(EngineDead):
        await collect(engine)
    with pytest.raises(EngineDead, match="EngineCore is dead"):
        await waiting
    with pytest.raises(EngineDead):
        await collect(engine)


async def test_a_prefill_for_another_engine_runs_to_its_length(engine_of: Make) -> None:
    """KV is handed over only by a request that did not stop by itself; until it is pulled it counts as held."""
    engine, llm = await engine_of(output(7, reason="length", params={"do_remote_prefill": True}))
    (answer,) = await collect(engine, dict(ASK_PREFILL), stop_token_ids=(7,))
    assert answer.kv_transfer_params == {"do_remote_prefill": True}
    sampling = llm.asked[0][1]
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ([], True)
    assert sampling.extra_args == {"kv_transfer_params": ASK_PREFILL}
    waiting = asyncio.ensure_future(engine.wait_handoffs())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert llm.record is not None
    llm.record(SimpleNamespace(num_running_reqs=0, kv_cache_usage=0.0, prefix_cache_stats=None), None)
    async with asyncio.timeout(5.0):
        await waiting


async def test_closed_it_takes_nothing(engine_of: Make) -> None:
    engine, _ = await engine_of(output(7, reason="stop"))
    await engine.close()
    await engine.wait_failed()
    with pytest.raises(EngineError, match="closed"):
        await collect(engine)


async def test_a_request_in_vllms_own_words_goes_as_it_came(engine_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through our sampling parameters, which say less; what comes back keeps its own words. The engine's card says
    of which version they are."""
    engine, llm = await engine_of()
    ran: list[Any] = []

    class CoreRequests:
        """In place of `api.core_requests`, which needs vLLM."""

        def __init__(self, given: Any) -> None:
            assert given is llm

        async def run(
            self, request: EngineRequest, request_id: str, params: Any, trace_headers: Any
        ) -> AsyncGenerator[EngineOutput, None]:
            ran.append((request.core, dict(params)))
            yield EngineOutput((7,), "length", core=[b"more"])

    module = SimpleNamespace(CoreRequests=CoreRequests)
    monkeypatch.setitem(sys.modules, "dynamo_local.engines.vllm.core_requests", module)
    request = EngineRequest("r", [1, 2], SamplingParams(max_tokens=4), {"do_remote_prefill": True}, core=[b"words"])
    assert [output.core async for output in engine.generate(request)] == [[b"more"]]
    assert ran == [([b"words"], {"do_remote_prefill": True})]
    assert not llm.asked
    assert (engine.info.options["tasks"], engine.info.options["version"]) == (["generate"], "0.fake")
