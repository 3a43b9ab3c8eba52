"""What must hold with real vLLM, on whatever host: `tests/vllm` runs it on the CPU, `tests/gpu` on CUDA."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scaled import ascale, events
from tests.fakes.served import Served, auntil
from tests.vllm.asking import Streaming, complete_all, engine_pids, prompt_tokens_by_source, prompts
from tests.vllm.hosts import VllmHost

LEAVE_S = 60.0
START_S = 590.0
ANSWER_TOKENS = 24
LONG_TOKENS = 600


@pytest.fixture(scope="session")
def answers() -> dict[str, str]:
    """What the aggregated graph said, by prompt; filled by the first test that asks it."""
    return {}


def asked(count: int | None = None) -> Sequence[str]:
    """The prompts that every graph must answer in the same way: 50, or DYN_VLLM_PROMPTS."""
    return prompts(count or int(os.environ.get("DYN_VLLM_PROMPTS", "50")))


async def reference(host: VllmHost, folder: Path, answers: dict[str, str]) -> dict[str, str]:
    """The aggregated graph's answers, asked for once per run."""
    if not answers:
        with host.aggregated(folder) as served:
            served.start()
            answers.update(zip(asked(), await complete_all(served, asked(), ANSWER_TOKENS), strict=True))
    return answers


class Aggregated:
    """One worker that does all."""

    async def test_requests_loads_disconnects_and_a_drain(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        """The same text streamed and not; a client that leaves frees its blocks; SIGTERM lets long streams end."""
        with vllm_host.aggregated(tmp_path) as served:
            served.start()
            texts = await complete_all(served, asked(), ANSWER_TOKENS)
            answers.update(zip(asked(), texts, strict=True))
            assert len(set(texts)) > 1, "the model says the same to everything: nothing would be shown"
            assert await complete_all(served, asked()[:2], ANSWER_TOKENS) == texts[:2]
            await self._a_client_leaves(served)
            await self._drained_by_sigterm(served)

    async def _a_client_leaves(self, served: Served) -> None:
        async with served.client() as client:
            stream = Streaming(client, asked()[0], 3000)
            await asyncio.wait_for(stream.started.wait(), 30.0)
            await auntil(lambda: _load(served, "VllmWorker")["request_active_slots"] == 1, what=served.status)
            stream.task.cancel()
            await asyncio.wait({stream.task})
        await auntil(lambda: _idle(_load(served, "VllmWorker")), 10.0, what=served.status)

    async def _drained_by_sigterm(self, served: Served) -> None:
        async with served.client() as client:
            streams = [Streaming(client, prompt, LONG_TOKENS) for prompt in asked()[:3]]
            await asyncio.wait_for(asyncio.gather(*(stream.started.wait() for stream in streams)), 60.0)
            engines = engine_pids(served)
            os.kill(served.pids()["VllmWorker"], signal.SIGTERM)
            reasons = await asyncio.wait_for(asyncio.gather(*(stream.task for stream in streams)), LEAVE_S)
        assert reasons == ["length"] * 3
        assert [stream.tokens for stream in streams] == [LONG_TOKENS] * 3
        await auntil(lambda: not set(engines) & set(engine_pids(served)), LEAVE_S, what=served.processes)
        assert engines


class Killed:
    """A worker that is killed leaves nothing behind, and is started again."""

    async def test_no_engine_core_survives_kill_9(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        """EngineCore is gone within seconds, the worker comes back, and answers; so when EngineCore is killed."""
        with vllm_host.aggregated(tmp_path) as served:
            served.start()
            for victim in ("worker", "engine"):
                engines, worker = engine_pids(served), served.pids()["VllmWorker"]
                cores = [pid for pid in engines if _is_engine_core(pid)]
                assert cores, served.processes()
                os.kill(worker if victim == "worker" else cores[0], signal.SIGKILL)
                await auntil(lambda pids=engines: not set(pids) & set(_alive(pids)), 10.0, what=served.processes)
                await auntil(lambda old=worker: _ready_anew(served, "VllmWorker", old), START_S, what=served.states)
                assert await complete_all(served, asked()[:1], 4)


class Disaggregated:
    """Prefill and decode apart: NixlConnector moves the KV."""

    async def test_the_same_answers_as_aggregated(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        """Token for token, over all prompts; every prompt token of the decode worker came by transfer."""
        expected = await reference(vllm_host, tmp_path, answers)
        with vllm_host.disaggregated(tmp_path) as served:
            served.start()
            keys = served.keys("dynamo/nixl_metadata/")
            assert len(keys) == 1, keys
            texts = await complete_all(served, asked(), ANSWER_TOKENS)
            wrong = [n for n, prompt in enumerate(asked()) if texts[n] != expected[prompt]]
            assert wrong == []
            served.down()
            decoded = prompt_tokens_by_source(served.log("VllmWorker"))
            prefilled = prompt_tokens_by_source(served.log("PrefillWorker"))
        assert decoded["external_kv_transfer"] > 0
        assert decoded.get("local_compute", 0) == 0, decoded
        assert decoded["external_kv_transfer"] == prefilled["local_compute"], (decoded, prefilled)


class Leaving:
    """Workers of both roles come and go while streams run."""

    async def test_prefill_and_decode_workers_come_and_go(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        """1P1D to 2P2D and back, by lease revoke and by `dynamo scale`, with long streams in flight: all complete."""
        with vllm_host.disaggregated(tmp_path) as served:
            served.start()
            async with served.client() as client:
                streams = [Streaming(client, prompt, LONG_TOKENS) for prompt in asked()[:2]]
                await asyncio.wait_for(asyncio.gather(*(stream.started.wait() for stream in streams)), 60.0)
                await ascale(served, "PrefillWorker", "+1")
                await auntil(lambda: served.states().get("PrefillWorker_1") == "ready", START_S, what=served.states)
                await auntil(lambda: len(served.keys("dynamo/nixl_metadata/")) == 2, what=served.keys)
                first = served.worker("PrefillWorker")["lease"]
                await asyncio.to_thread(served.etcdctl, "lease", "revoke", first)
                assert await complete_all(served, prompts(4, seed=11), 8)
                await auntil(lambda: served.states().get("PrefillWorker") != "draining", LEAVE_S, what=served.states)
                await auntil(lambda: len(served.keys("dynamo/nixl_metadata/")) == 1, what=served.keys)
                reasons = await asyncio.wait_for(asyncio.gather(*(stream.task for stream in streams)), LEAVE_S)
            assert reasons == ["length"] * 2
            assert [stream.tokens for stream in streams] == [LONG_TOKENS] * 2
            assert "prefilled locally" not in served.log("VllmWorker")

    async def test_a_decode_worker_leaves_by_its_lease(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        """Its long streams complete, its memory and processes go; the other one serves on."""
        with vllm_host.aggregated(tmp_path, **{"ServiceArgs": {"workers": 2}}) as served:
            served.start()
            async with served.client() as client:
                streams = [Streaming(client, prompt, LONG_TOKENS) for prompt in asked()[:4]]
                await asyncio.wait_for(asyncio.gather(*(stream.started.wait() for stream in streams)), 60.0)
                gone = engine_pids(served, "VllmWorker_1")
                lease = served.worker("VllmWorker_1")["lease"]
                await asyncio.to_thread(served.etcdctl, "lease", "revoke", lease)
                reasons = await asyncio.wait_for(asyncio.gather(*(stream.task for stream in streams)), LEAVE_S)
            assert reasons == ["length"] * 4
            assert gone
            await auntil(lambda: not _alive(gone), LEAVE_S, what=served.processes)
            await auntil(lambda: "VllmWorker_1" not in served.states(), LEAVE_S, what=served.states)
            left = [event for event in events(served, "VllmWorker_1") if event["event"] == "ProcessExited"]
            assert [event["exit_code"] for event in left] == [0]
            assert await complete_all(served, asked()[:1], 4)


class PrefillDies:
    """The client sees a pause, not an error."""

    async def test_a_killed_prefill_worker_costs_a_pause(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        """Killed while prompts are under way: each is prefilled again, elsewhere or here, and the texts are right."""
        expected = await reference(vllm_host, tmp_path, answers)
        some = list(asked())[:8]
        with vllm_host.disaggregated(tmp_path, **{"prefill-timeout-s": 6.0}) as served:
            served.start()
            assert await complete_all(served, some[:1], ANSWER_TOKENS) == [expected[some[0]]]
            asking = asyncio.create_task(complete_all(served, some, ANSWER_TOKENS, at_once=8))
            await asyncio.sleep(0.05)
            os.kill(served.pids()["PrefillWorker"], signal.SIGKILL)
            texts = await asyncio.wait_for(asking, 60.0)
            assert texts == [expected[prompt] for prompt in some]
            await auntil(lambda: served.keys("dynamo/nixl_metadata/") == [], 20.0, what=served.keys)


class Planned:
    """The load planner sees vLLM's own cache use."""

    async def test_a_full_cache_brings_another_worker(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        """KV load above 0.9 over an interval: one more worker is started, and the decision says why."""
        planner = {"adjustment-interval": 5, "metric-pulling-interval": 1, "max-gpu-budget": 2}
        with vllm_host.aggregated(tmp_path, planner=planner) as served:
            served.start()
            async with served.client() as client:
                streams = [Streaming(client, prompt, 900) for prompt in prompts(24, words=400)]
                await auntil(lambda: (_load(served, "VllmWorker").get("gpu_cache_usage_perc") or 0) > 0.9, 120.0)
                await auntil(lambda: "VllmWorker_1" in served.states(), 120.0, what=served.states)
                for stream in streams:
                    stream.task.cancel()
                await asyncio.wait({stream.task for stream in streams})
            explained = await asyncio.to_thread(served.cli, "planner", "explain", "20")
            assert "VllmWorker" in explained.stdout, explained.stderr
            served.down("--now")


# --- what is seen --------------------------------------------------------------------------------


def _load(served: Served, name: str) -> dict[str, Any]:
    load: dict[str, Any] | None = served.worker(name)["load"]
    return load or {"request_active_slots": None}


def _idle(load: dict[str, Any]) -> bool:
    return load["request_active_slots"] == 0 and load["gpu_cache_usage_perc"] == 0.0


def _alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]


def _is_engine_core(pid: int) -> bool:
    try:
        return "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _ready_anew(served: Served, name: str, old_pid: int) -> bool:
    worker = served.worker(name)
    return bool(worker["state"] == "ready" and worker["pid"] != old_pid)
