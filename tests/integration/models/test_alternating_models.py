"""Three models on too few GPUs under alternating load, with commands and killed workers between: 0 failed."""

from __future__ import annotations

import os

import pytest

from tests.drivers.alternating import Alternating
from tests.drivers.models import of_models

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.alone]

SECONDS = float(os.environ.get("DYN_MODELS_SECONDS", "120"))
MODEL = {
    "model": "sim-tiny",
    "engine": "sim",
    "standby": 0,
    "min-stay-s": 3.0,
    "idle-s": 20.0,
    "sim": {"start-up-s": 2.0, "sleep-s": 0.1, "wake-s": 0.3},
}
MODELS = ("a", "b", "c")


@pytest.mark.timeout(SECONDS + 400)
@pytest.mark.parametrize(("gpus", "apart"), [(2, ""), (4, "ac")], ids=["aggregated", "apart"])
async def test_no_request_fails_whatever_the_models_workers_do(gpus: int, apart: str) -> None:
    host = {"restart": {"failures-max": 100_000}}  # our kills must not make a worker faulted
    models = {name: {**MODEL, "prefill": int(name in apart)} for name in MODELS}
    with of_models(models, f"sim:{gpus}", host=host).started() as served:
        trial = Alternating(served, MODELS, SECONDS)
        await trial.run()
        print(trial)
        assert trial.failures == [], (trial.failures[:3], trial.done)
        assert trial.good > SECONDS / 4, trial.done
        assert len(trial.done) > SECONDS / 12
