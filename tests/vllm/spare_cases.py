"""Spares of real vLLM: what they become serves as any worker, sooner, and shows no secret."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from tests.drivers.scaled import PATIENCE_S, ascale, settled
from tests.drivers.served import Served, auntil
from tests.vllm.asking import complete_all
from tests.vllm.cases import ANSWER_TOKENS, START_S, asked, reference
from tests.vllm.hosts import VllmHost

SECRET = "sk-only-the-frontend-knows"
ROUNDS = int(os.environ.get("DYN_VLLM_SPARE_ROUNDS", "2"))
SHARE_MAX = 1 / 3
"""Share of the time of a cold start."""


class PrewarmedPool:
    """`Host.spares`."""

    async def test_a_spare_becomes_a_worker_in_a_third_of_the_time_and_answers_as_any(
        self, vllm_host: VllmHost, tmp_path: Path, answers: dict[str, str]
    ) -> None:
        expected = await reference(vllm_host, tmp_path, answers)
        host = VllmHost(vllm_host.model, vllm_host.gpus, vllm_host.args, {**vllm_host.env, "MY_API_KEY": SECRET})
        took_s: dict[str, list[float]] = {"spare": [], "cold": []}
        with host.aggregated(tmp_path, words=("--Host.spares=1",)).started() as served:
            for _ in range(ROUNDS):
                spare = await _warm(served)
                _shows_no_secret(spare["pid"])
                took_s["spare"].append(await _one_more(served))
                assert served.worker("VllmWorker_1")["pid"] == spare["pid"]
                _shows_no_secret(spare["pid"])
                texts = await complete_all(served, asked()[:8], ANSWER_TOKENS)
                assert texts == [expected[prompt] for prompt in asked()[:8]]
                await ascale(served, "VllmWorker", "-1")
                await settled(served, PATIENCE_S)
        with host.aggregated(tmp_path).started() as served:
            for _ in range(ROUNDS):
                took_s["cold"].append(await _one_more(served))
                await ascale(served, "VllmWorker", "-1")
                await settled(served, PATIENCE_S)
        print(f"seconds from the command to ready: {took_s}, load {os.getloadavg()[0]:.1f}")
        assert statistics.median(took_s["spare"]) <= SHARE_MAX * statistics.median(took_s["cold"]), took_s


async def _warm(served: Served) -> dict[str, Any]:
    def warm() -> dict[str, Any] | None:
        spares: list[dict[str, Any]] = served.status()["spares"]["spares"]
        return next((spare for spare in spares if spare["state"] == "warm"), None)

    return await auntil(warm, START_S, what=lambda: served.status()["spares"]) or {}


async def _one_more(served: Served) -> float:
    """Seconds from `dynamo scale VllmWorker +1` to ready."""
    began_s = time.monotonic()
    await asyncio.to_thread(served.ok, "scale", "VllmWorker", "+1", "--wait", timeout_s=START_S)
    return time.monotonic() - began_s


def _shows_no_secret(pid: int) -> None:
    """Neither environment nor command line of the process and its children."""
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        shown = Path(f"/proc/{each.pid}/environ").read_bytes() + Path(f"/proc/{each.pid}/cmdline").read_bytes()
        assert SECRET.encode() not in shown
