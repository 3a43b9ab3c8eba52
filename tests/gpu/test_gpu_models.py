"""Two models on one card, switched to and fro: each answer as before, memory given back, none of the requests refused.

With `DYN_VLLM_MODEL=FOLDER` it is vLLM on the first card, fifty times; else the sim engine, a few times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dynamo_local.system.gpus import open_inventory
from tests.drivers.models import of_models
from tests.drivers.served import Served

pytestmark = [pytest.mark.gpu, pytest.mark.infra, pytest.mark.timeout(1800)]

TOKENS = 16
RESIDUE_GROWTH_MAX_BYTES = 1 << 30
"""A process that sleeps keeps some memory. It may not grow by more than this over all switches."""


@dataclass(frozen=True)
class World:
    """A model's section, the GPUs, and the number of switches."""

    section: Mapping[str, Any]
    gpus: str
    switches: int

    def used_bytes(self) -> int:
        used = open_inventory(self.gpus, os.environ).sample()[0].memory_used_bytes
        assert isinstance(used, int)
        return used


@pytest.fixture(scope="module")
def world() -> World:
    folder = os.environ.get("DYN_VLLM_MODEL")
    if not folder:
        sim = {"model": "sim-tiny", "engine": "sim", "sim": {"start-up-s": 0.2, "sleep-s": 0.1, "wake-s": 0.1}}
        return World(sim, "sim:1", 4)
    vllm = {"model": folder, "engine": "vllm", "max-model-len": 4096, "enforce-eager": True}
    return World(vllm, os.environ.get("DYN_VLLM_GPUS", "0"), 50)


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    models = {name: {**world.section, "standby": 0, "min-stay-s": 0.5} for name in "ab"}
    inherited = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "LD_", "VLLM_", "HF_"))}
    with of_models(models, world.gpus, env=inherited) as graph:
        yield graph.start()


def answer(served: Served, model: str) -> tuple[str, float]:
    """The text, and the seconds until it was there."""
    body = {"model": model, "prompt": "The quick brown fox", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    began_s = time.monotonic()
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300.0)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"], time.monotonic() - began_s


def test_switches_change_no_answer_and_keep_no_memory(world: World, served: Served) -> None:
    first = {model: answer(served, model) for model in "ab"}
    before = world.used_bytes()
    took = []
    for n in range(world.switches):
        model = "ab"[n % 2]
        text, took_s = answer(served, model)
        took.append(took_s)
        assert text == first[model][0], f"switch {n + 1}, to {model}"
        (row,) = (each for each in served.status()["models"] if each["model"] == model)
        assert row["ready"] == 1
    grown = world.used_bytes() - before
    print(f"{len(took)} switches: p50 {sorted(took)[len(took) // 2]:.2f} s, longest {max(took):.2f} s", end="; ")
    print(f"first answers after {first['a'][1]:.1f} and {first['b'][1]:.1f} s; memory grew by {grown / 2**20:.0f} MiB")
    assert grown < RESIDUE_GROWTH_MAX_BYTES
