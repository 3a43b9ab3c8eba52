"""Three models on two GPUs with vLLM's CPU build, under alternating load, with commands between: 0 failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.drivers.alternating import Alternating
from tests.drivers.models import of_models
from tests.vllm.hosts import START_TIMEOUT_S, VllmHost

pytestmark = [pytest.mark.vllm, pytest.mark.infra, pytest.mark.full, pytest.mark.alone]

SECONDS = float(os.environ.get("DYN_MODELS_SECONDS", "180"))
MODELS = ("a", "b", "c")
GRACEFUL = ("drain", "restart", "more")
SHARED = {"min-stay-s": 3.0, "idle-s": 60.0, "max-wait-s": 400.0}


def engine(host: VllmHost, name: str) -> dict[str, Any]:
    """Workers of ours. They leave, and start again: the CPU build has no sleep mode."""
    return {"engine": "vllm", **host.args}


def command(host: VllmHost, name: str) -> dict[str, Any]:
    """`vllm serve`, one thread each."""
    return {"command": host.vllm_serve(name), "envs": dict(host.env)}


@pytest.mark.timeout(SECONDS + 1500)
@pytest.mark.parametrize(
    ("section", "actions"),
    [(engine, ("kill", *GRACEFUL)), (command, GRACEFUL)],
    ids=["engines", "commands"],
)
async def test_no_request_fails_whatever_the_models_workers_do(
    vllm_host: VllmHost, section: Callable[[VllmHost, str], dict[str, Any]], actions: Sequence[str]
) -> None:
    """A command that is killed cuts its streams (docs/migration.md), so none is killed here."""
    models = {name: {"model": str(vllm_host.model), **SHARED, **section(vllm_host, name)} for name in MODELS}
    host, env = {"restart": {"failures-max": 100_000}}, dict(vllm_host.env)
    with of_models(models, "sim:2", host=host, env=env, timeout_s=START_TIMEOUT_S).started() as served:
        trial = Alternating(served, MODELS, SECONDS, clients=4, tokens=40, patience_s=600.0, actions=actions)
        trial.changes_s, trial.troubled_s = 90.0, 30.0  # a start of vLLM takes most of a minute
        await trial.run()
        print(trial)
        assert trial.failures == [], (trial.failures[:3], trial.done)
        assert trial.good > SECONDS / 12, trial.done
        assert len(trial.done) > SECONDS / 90
