"""Cases with real vLLM, on whatever host: `tests/vllm` runs it on the CPU, `tests/gpu` on CUDA."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from tests.drivers.planned import decided
from tests.drivers.routed import decisions, router_status, until_status
from tests.drivers.scaled import ascale, load, names
from tests.drivers.served import Served, auntil
from tests.vllm.asking import Streaming, complete, complete_all, long_streams, prompts, same_again
from tests.vllm.hosts import VllmHost
from tests.vllm.seeing import alive, engine_cores, engine_pids, exit_codes, prompt_tokens_by_source

LEAVE_S = 180.0
"""A prefill worker stays for up to a minute with KV that nobody pulls."""
AT_ONCE_S = 15.0
"""Milliseconds, on a machine that does nothing else."""
START_S = 590.0
ANSWER_TOKENS = 24
LONG_TOKENS = 600


@pytest.fixture(scope="session")
def answers() -> dict[str, str]:
    """The aggregated graph's answers by prompt; the first test that asks fills them in."""
    return {}


def asked(count: int | None = None) -> Sequence[str]:
    """The prompts that every graph must answer in the same way: 50, or DYN_VLLM_PROMPTS."""
    return prompts(count or int(os.environ.get("DYN_VLLM_PROMPTS", "50")))


async def reference(host: VllmHost, folder: Path, answers: dict[str, str]) -> dict[str, str]:
    if not answers:
        with host.aggregated(folder).started() as served:
            answers.update(zip(asked(), await complete_all(served, asked(), ANSWER_TOKENS), strict=True))
    return answers


class Aggregated:
    """One worker that does all."""

    async def test_requests_loads_disconnects_and_a_drain(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        with vllm_host.aggregated(tmp_path).started() as served:
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
        async with long_streams(served, asked()[:3], LONG_TOKENS, LEAVE_S):
            engines = engine_pids(served)
            os.kill(served.pids()["VllmWorker"], signal.SIGTERM)
        assert engines
        await auntil(lambda: not alive(engines), LEAVE_S, what=served.processes)


class Killed:
    """A worker that is killed leaves nothing behind, and is started again."""

    async def test_a_killed_worker_leaves_nothing_and_comes_back(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        with vllm_host.aggregated(tmp_path).started() as served:
            before = await complete_all(served, asked()[:1], ANSWER_TOKENS)
            await self._killed(served, "worker", -signal.SIGKILL)
            assert await complete_all(served, asked()[:1], ANSWER_TOKENS) == before
            await self._killed(served, "engine", 1)
            assert await complete_all(served, asked()[:1], ANSWER_TOKENS) == before

    async def _killed(self, served: Served, victim: str, code: int) -> None:
        worker, engines, shared = served.pids()["VllmWorker"], engine_pids(served), served.shared_memory()
        (core,) = engine_cores(served)
        count = len(exit_codes(served, "VllmWorker"))
        os.kill(worker if victim == "worker" else core, signal.SIGKILL)
        await auntil(lambda: not alive([worker, *engines]), AT_ONCE_S, what=served.processes)
        await auntil(lambda: not shared & served.shared_memory(), AT_ONCE_S, what=served.shared_memory)
        await auntil(lambda: _ready_anew(served, "VllmWorker", worker), START_S, what=served.states)
        assert exit_codes(served, "VllmWorker")[count:] == [code]


class Lost:
    """Streams whose worker is killed go on when it is there again, as if nothing had been."""

    LONG = 1500

    async def test_streams_go_on_behind_their_tokens(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        """Greedy answers are the same, with logprobs and stop strings as well. One that follows a grammar has an
        error."""
        bodies: dict[str, dict[str, Any]] = {
            "plain": {"temperature": 0},
            "logprobs": {"temperature": 0, "logprobs": 1},
            "several": {"temperature": 0.7, "seed": 3, "n": 2},
        }
        with vllm_host.aggregated(tmp_path).started() as served:
            async with served.client() as client:
                first = Told(client, bodies["plain"], self.LONG)
                await first.task
                bodies["stop"] = {"temperature": 0, "stop": [first.texts[0][-40:-20]]}
                whole = {name: Told(client, body, self.LONG) for name, body in bodies.items()}
                await asyncio.gather(*(told.task for told in whole.values()))
                grammar = Told(client, {"extra_body": {"structured_outputs": {"regex": "[ab]+"}}}, self.LONG)
                await asyncio.wait_for(grammar.begun.wait(), 60.0)  # it has been compiled
                cut = {name: Told(client, body, self.LONG) for name, body in bodies.items()}
                await asyncio.wait_for(asyncio.gather(*(told.begun.wait() for told in cut.values())), 60.0)
                os.kill(served.pids()["VllmWorker"], signal.SIGKILL)
                with pytest.raises(APIError, match="worker"):
                    await grammar.task
                await asyncio.gather(*(told.task for told in cut.values()))
            moved = [line for line in served.log("Frontend").splitlines() if "goes on at another worker" in line]
            assert len(moved) == 5, moved
        for name in ("plain", "logprobs", "stop"):
            assert (cut[name].texts, cut[name].tokens) == (whole[name].texts, whole[name].tokens)
            assert len(cut[name].logprobs) == len(whole[name].logprobs)
        assert cut["several"].tokens == whole["several"].tokens
        assert len(set(cut["several"].texts)) == 2


class Told:
    """A streamed completion under way: each choice's text, and what else was told. `begun` at its first text."""

    def __init__(self, client: AsyncOpenAI, body: Mapping[str, Any], max_tokens: int) -> None:
        self.texts = ["", ""]
        self.logprobs: list[float | None] = []
        self.tokens = 0
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(client, body, max_tokens))

    async def _run(self, client: AsyncOpenAI, body: Mapping[str, Any], max_tokens: int) -> None:
        extra = {"ignore_eos": True, **body.get("extra_body", {})}
        stream = await client.completions.create(
            model="tiny",
            prompt="a worker leaves",
            max_tokens=max_tokens,
            stream=True,
            **{**body, "extra_body": extra, "stream_options": {"include_usage": True}},
        )
        async for chunk in stream:
            self.tokens = chunk.usage.completion_tokens if chunk.usage else self.tokens
            for choice in chunk.choices:
                self.texts[choice.index] += choice.text
                self.logprobs += (choice.logprobs and choice.logprobs.token_logprobs) or []
                if choice.text:
                    self.begun.set()


class Disaggregated:
    """Prefill and decode apart: NixlConnector moves the KV."""

    async def test_the_same_answers_as_aggregated(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        expected = await reference(vllm_host, tmp_path, answers)
        with vllm_host.disaggregated(tmp_path).started() as served:
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


class Routed:
    """KV events of real engines reach the Router's index, and what it finds there is true."""

    async def test_a_repeated_prefix_goes_to_the_worker_that_holds_it(
        self, vllm_host: VllmHost, tmp_path: Path
    ) -> None:
        two = {"ServiceArgs": {"workers": 2}, "enable-prefix-caching": True}
        block_size = vllm_host.block_size
        with vllm_host.aggregated(tmp_path, router="kv", **two).started() as served:
            some = prompts(4, words=200, seed=3)
            async with served.client() as client, router_status(served) as status:
                first = [await complete(client, prompt, 8) for prompt in some]
                blocks = sum(length // block_size for _, length, _ in first)
                await until_status(status, lambda s: s["blocks"] >= blocks)
                again = [await complete(client, prompt, 8) for prompt in some]
                longer = [await complete(client, f"{prompt} and so on", 8) for prompt in some]
            assert again == first
            routed = decisions(served)
            holders = [worker for worker, _, _ in routed[:4]]
            assert len(set(holders)) == 2, routed
            assert [worker for worker, _, _ in routed[4:]] == holders * 2
            assert all(policy == "kv" and rate > 0.8 for _, policy, rate in routed[4:]), routed
            lengths = [length for _, length, _ in again + longer]
            foreseen = [round(rate * n / block_size) for n, (_, _, rate) in zip(lengths, routed[4:], strict=True)]
            served.down()
            found = prompt_tokens_by_source(served.log("VllmWorker") + served.log("VllmWorker_1"))
        # One token at least is computed: of a prompt that is cached to its end vLLM computes the last block again.
        hits = sum(min(held, (n - 1) // block_size) for held, n in zip(foreseen, lengths, strict=True))
        assert found["local_cache_hit"] == hits * block_size, (found, foreseen)

    async def test_the_hit_rate_decides_between_local_and_remote(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        conditional = {"conditional-disagg": True, "max-local-prefill-length": 100, "enable-prefix-caching": True}
        with vllm_host.disaggregated(tmp_path, router="kv", **conditional).started() as served:
            one, other = prompts(2, words=200, seed=5)
            async with served.client() as client, router_status(served) as status:
                text, length, _ = await complete(client, one, 8)
                await until_status(status, lambda s: s["blocks"] > 0)
                assert (await complete(client, one, 8))[0] == text
                _, other_length, _ = await complete(client, other, 8)
            rates = [rate for _, _, rate in decisions(served)]
            assert rates[0] == rates[2] == 0.0, rates
            assert rates[1] > 0.8, rates
            lengths = re.findall(r"Remote prefill: (\w+) \(prefill length: (\d+)/(\d+)", served.log("VllmWorker"))
            assert [remote for remote, _, _ in lengths] == ["True", "False", "True"]
            assert abs(int(lengths[1][1]) - length * (1 - rates[1])) <= 2, lengths
            served.down()
            decoded = prompt_tokens_by_source(served.log("VllmWorker"))
        assert decoded["external_kv_transfer"] == length + other_length
        assert decoded["local_cache_hit"] > 0.8 * length


class Leaving:
    """Workers of both roles come and go while streams run."""

    async def test_prefill_and_decode_workers_come_and_go(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        with vllm_host.disaggregated(tmp_path, **{"prefill-timeout-s": 30.0}).started() as served:
            async with load(served, 3, same_again(asked()[:12], ANSWER_TOKENS)) as answers:
                await self._one_more(served, "PrefillWorker")
                await auntil(lambda: len(served.keys("dynamo/nixl_metadata/")) == 2, what=served.keys)
                async with long_streams(served, asked()[:2], LONG_TOKENS, LEAVE_S):
                    first = served.worker("PrefillWorker")["lease"]
                    await asyncio.to_thread(served.etcdctl, "lease", "revoke", first)
                await auntil(lambda: names(served, "PrefillWorker") == ["PrefillWorker_1"], LEAVE_S, what=served.states)
                await auntil(lambda: exit_codes(served, "PrefillWorker") == [0], LEAVE_S, what=served.states)
                await auntil(lambda: len(served.keys("dynamo/nixl_metadata/")) == 1, what=served.keys)
                await self._one_more(served, "VllmWorker")
                async with long_streams(served, asked()[:4], LONG_TOKENS, LEAVE_S):
                    ((_, gone),) = await ascale(served, "VllmWorker", "-1")
                await auntil(lambda: exit_codes(served, gone) == [0], LEAVE_S, what=served.states)
                await answers.more(1)
            answers.check()
            served.down()
            told = served.log("VllmWorker") + served.log("VllmWorker_1")
            decoded = prompt_tokens_by_source(told)
            prefilled = prompt_tokens_by_source(served.log("PrefillWorker") + served.log("PrefillWorker_1"))
        # A pull may come past its deadline where four engines share two cores: the prompt is prefilled again, here, and
        # said so. Nothing else is computed by a decode worker, and no prompt token is lost or counted twice.
        late = [line for line in told.splitlines() if "its KV did not arrive" in line]
        assert bool(decoded["local_compute"]) == bool(late), (decoded, late)
        assert len(late) <= answers.right / 20, late
        asked_for = decoded["external_kv_transfer"] + decoded["local_compute"]
        assert asked_for == prefilled["local_compute"], (decoded, prefilled, late)

    async def _one_more(self, served: Served, component: str) -> None:
        await ascale(served, component, "+1")
        await auntil(lambda: served.states().get(f"{component}_1") == "ready", START_S, what=served.states)

    async def test_a_decode_worker_leaves_by_its_lease(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        with vllm_host.aggregated(tmp_path, **{"ServiceArgs": {"workers": 2}}).started() as served:
            async with long_streams(served, asked()[:4], LONG_TOKENS, LEAVE_S):
                gone, shared = engine_pids(served, "VllmWorker_1"), served.shared_memory()
                lease = served.worker("VllmWorker_1")["lease"]
                await asyncio.to_thread(served.etcdctl, "lease", "revoke", lease)
            assert gone
            await auntil(lambda: not alive(gone), LEAVE_S, what=served.processes)
            await auntil(lambda: "VllmWorker_1" not in served.states(), LEAVE_S, what=served.states)
            assert exit_codes(served, "VllmWorker_1") == [0]
            assert served.shared_memory() <= shared
            assert await complete_all(served, asked()[:1], 4)


class PrefillDies:
    """The client sees a pause, not an error."""

    async def test_a_killed_prefill_worker_costs_a_pause(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        expected = await reference(vllm_host, tmp_path, answers)
        some = list(asked())[:8]
        texts = [expected[prompt] for prompt in some]
        with vllm_host.disaggregated(tmp_path, **{"prefill-timeout-s": 6.0}).started() as served:
            assert await complete_all(served, some[:1], ANSWER_TOKENS) == texts[:1]
            victim, sent = served.pids()["PrefillWorker"], _sent_away(served)
            asking = asyncio.create_task(complete_all(served, some, ANSWER_TOKENS, at_once=8))
            await auntil(lambda: _sent_away(served) > sent, what=lambda: served.log("VllmWorker"))
            os.kill(victim, signal.SIGKILL)
            assert await asyncio.wait_for(asking, 60.0) == texts
            assert "is prefilled locally" in served.log("VllmWorker"), "it was killed too late"
            await auntil(lambda: _ready_anew(served, "PrefillWorker", victim), START_S, what=served.states)
            await auntil(lambda: len(served.keys("dynamo/nixl_metadata/")) == 1, 20.0, what=served.keys)
            sent, alone = _sent_away(served), served.log("VllmWorker").count("is prefilled locally")
            assert await complete_all(served, some, ANSWER_TOKENS) == texts
            assert _sent_away(served) == sent + len(some)
            assert served.log("VllmWorker").count("is prefilled locally") == alone


class Planned:
    """The load planner sees vLLM's own cache use."""

    async def test_a_full_cache_brings_another_worker(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        planner = {"adjustment-interval": 5, "metric-pulling-interval": 1, "max-gpu-budget": 2}
        small = {"num-gpu-blocks-override": 9600 // vllm_host.block_size}
        with vllm_host.aggregated(tmp_path, planner=planner, **small).started() as served:
            async with load(served, 20, same_again(prompts(20, words=400), 150)) as answers:
                await auntil(lambda: (_load(served, "VllmWorker").get("gpu_cache_usage_perc") or 0) > 0.9, 120.0)
                await auntil(lambda: served.states().get("VllmWorker_1") == "ready", START_S, what=served.states)
                await auntil(lambda: _load(served, "VllmWorker_1")["request_active_slots"], 60.0, what=served.status)
            answers.check()
            reasons = [reason for record in decided(served) for reason in record["decision"]["reasons"]]
        up = [reason for reason in reasons if reason["step"] == 1]
        assert [reason["rule"] for reason in up] == ["scale_up"], up
        assert up[0]["numbers"]["average_kv_load"] > 0.9


def _load(served: Served, name: str) -> dict[str, Any]:
    load: dict[str, Any] | None = served.worker(name)["load"]
    return load or {"request_active_slots": None}


def _idle(load: dict[str, Any]) -> bool:
    return load["request_active_slots"] == 0 and load["gpu_cache_usage_perc"] == 0.0


def _sent_away(served: Served) -> int:
    return served.log("VllmWorker").count("Remote prefill: True")


def _ready_anew(served: Served, name: str, old_pid: int) -> bool:
    worker = served.worker(name)
    return bool(worker["state"] == "ready" and worker["pid"] != old_pid)
