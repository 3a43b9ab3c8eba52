"""The cases of `tests/vllm` on CUDA, with a model that the caller names: `DYN_VLLM_MODEL=/models/… pytest tests/gpu`.

DYN_VLLM_GPUS says which GPUs (by default all). See docs/vllm.md.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import open_inventory
from tests.vllm import cases, profile_cases
from tests.vllm.cases import answers
from tests.vllm.hosts import VllmHost, cuda_host

__all__ = ["answers"]

GPUS = 3
"""Two workers of one role beside one of the other."""

pytestmark = [pytest.mark.gpu, pytest.mark.infra, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def vllm_host() -> VllmHost:
    """CUDA, if there is some, with as many free GPUs as the largest case has workers."""
    model = os.environ.get("DYN_VLLM_MODEL")
    if not model:
        pytest.skip("DYN_VLLM_MODEL is not set: the folder of a model that fits one GPU")
    if not is_installed() or importlib.metadata.version("vllm").endswith("+cpu"):
        pytest.skip("the CUDA build of vLLM is not installed: pip install '.[vllm]' in the clone")
    host = cuda_host(Path(model))
    try:
        devices = open_inventory(host.gpus, os.environ).sample()
    except GpuError as error:
        pytest.skip(f"no GPUs here: {error}")
    if len(devices) < GPUS:
        pytest.skip(f"{GPUS} GPUs are needed, here are {len(devices)}")
    return host


class TestAggregated(cases.Aggregated):
    """One worker that does all."""


class TestDisaggregated(cases.Disaggregated):
    """Prefill and decode apart."""


class TestRouted(cases.Routed):
    """KV-aware routing."""


class TestLeaving(cases.Leaving):
    """Workers come and go."""


class TestKilled(cases.Killed):
    """SIGKILL."""


class TestPrefillDies(cases.PrefillDies):
    """A prefill worker is killed under load."""


class TestPlanned(cases.Planned):
    """The load planner."""


class TestProfiled(profile_cases.Profiled):
    """`dynamo profile`: with the GPU's memory, the driver and UUIDs; equal engines each on its own."""
