"""Three models on too few GPUs under alternating load, with commands and killed workers between: 0 failed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field

import httpx
import pytest
import yaml

from dynamo_local.cli.common import ask_arbiter
from dynamo_local.config.models import prefill_of
from dynamo_local.errors import DynamoError
from tests.drivers.served import Served

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.alone]

SECONDS = float(os.environ.get("DYN_MODELS_SECONDS", "120"))
SEED = int(os.environ.get("DYN_MODELS_SEED", "7"))
WAKE_S = 0.3
MODEL = {
    "model": "sim-tiny",
    "engine": "sim",
    "standby": 0,
    "min-stay-s": 3.0,
    "idle-s": 20.0,
    "sim": {"start-up-s": 2.0, "sleep-s": 0.1, "wake-s": WAKE_S},
}
MODELS = ("a", "b", "c")
CALM_S = 0.5
"""No model is asked by all clients at once for longer than some seconds; this is a client's pause."""


@dataclass(slots=True)
class Counts:
    """Answers by outcome, and the first failures in words."""

    good: int = 0
    failures: list[str] = field(default_factory=list)


async def client(url: str, seed: int, until_s: float, counts: Counts) -> None:
    """Asks for one model for some seconds, then for another; each answer is streamed to its end."""
    rng = random.Random(seed)
    model, changes_s = rng.choice(MODELS), time.monotonic() + rng.uniform(2.0, 15.0)
    async with httpx.AsyncClient(timeout=180.0) as http:
        while (now_s := time.monotonic()) < until_s:
            if now_s >= changes_s:
                model, changes_s = rng.choice(MODELS), now_s + rng.uniform(2.0, 15.0)
            tokens = rng.randint(1, 120)
            body = {
                "model": model,
                "max_tokens": tokens,
                "stream": True,
                "messages": [{"role": "user", "content": "x"}],
            }
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                text = (await response.aread()).decode()
            if response.status_code == 200 and text.rstrip().endswith("data: [DONE]"):
                counts.good += 1
            else:
                counts.failures.append(f"{model}: {response.status_code} … {text[-300:]}")
            await asyncio.sleep(rng.uniform(0.0, CALM_S))


async def trouble(served: Served, until_s: float) -> list[str]:
    """Every few seconds a command of a person, or the end of a worker by SIGKILL. Returns what was done."""
    rng, done = random.Random(SEED), []
    while time.monotonic() < until_s:
        await asyncio.sleep(rng.uniform(2.0, 6.0))
        workers = {*MODELS, *map(prefill_of, MODELS)}
        rows = [row for row in served.status()["workers"] if row["component"] in workers and row["state"] == "ready"]
        if not rows:
            continue
        row, what = rng.choice(rows), rng.choice(("kill", "sleep", "drain", "restart", "more"))
        try:
            match what:
                case "kill":
                    os.kill(row["pid"], signal.SIGKILL)
                case "more":
                    ask_arbiter(served.paths, "dynamo_scale", component=row["component"], target="+1")
                case _:
                    ask_arbiter(served.paths, f"dynamo_{what}", name=row["watcher_name"])
        except (DynamoError, ProcessLookupError) as error:
            done.append(f"{what} {row['watcher_name']}: refused: {error}")
        else:
            done.append(f"{what} {row['watcher_name']}")
    return done


@pytest.mark.timeout(SECONDS + 400)
@pytest.mark.parametrize(("gpus", "apart"), [(2, ""), (4, "ac")], ids=["aggregated", "apart"])
async def test_no_request_fails_whatever_the_models_workers_do(gpus: int, apart: str) -> None:
    host = {"gpus": f"sim:{gpus}", "restart": {"failures-max": 100_000}}  # our kills must not make a worker faulted
    models = {name: {**MODEL, "prefill": int(name in apart)} for name in MODELS}
    text = yaml.safe_dump({"Host": host, "Models": models})
    with Served("-f", "models.yaml", target=(), files={"models.yaml": text}).started() as served:
        counts, until_s = Counts(), time.monotonic() + SECONDS
        clients = [client(served.url, SEED * 100 + n, until_s, counts) for n in range(6)]
        done, *_ = await asyncio.gather(trouble(served, until_s), *clients)
        assert counts.failures == [], (counts.failures[:3], done)
        assert counts.good > SECONDS / 4, done
        assert len(done) > SECONDS / 12
        print(f"{counts.good} answers, {len(done)} actions, of them {sum('refused' in each for each in done)} refused")
