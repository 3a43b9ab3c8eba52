"""Clients that ask for one model, then for another, and a person who commands and kills their workers meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from dynamo_local.cli.common import ask_arbiter
from dynamo_local.config.models import prefill_of
from dynamo_local.errors import DynamoError
from tests.drivers.models import chat
from tests.drivers.served import Served

SEED = int(os.environ.get("DYN_MODELS_SEED", "7"))
ACTIONS = ("kill", "sleep", "drain", "restart", "more")
CALM_S = 0.5
"""No model is asked by all clients at once for longer than some seconds; this is a client's pause."""


@dataclass(slots=True)
class Alternating:
    """The load and the trouble, for so many seconds; then what came of it.

    `changes_s`: a client asks for one model for so long, at most. `troubled_s`: the longest time between two actions.
    """

    served: Served
    models: Sequence[str]
    seconds: float
    clients: int = 6
    tokens: int = 120
    patience_s: float = 180.0
    changes_s: float = 15.0
    troubled_s: float = 6.0
    actions: Sequence[str] = ACTIONS
    good: int = 0
    failures: list[str] = field(default_factory=list)
    """In words."""
    done: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """All clients and the person, at once."""
        until_s = time.monotonic() + self.seconds
        clients = (self._client(SEED * 100 + n, until_s) for n in range(self.clients))
        await asyncio.gather(self._trouble(until_s), *clients)

    def __str__(self) -> str:
        refused = sum("refused" in each for each in self.done)
        return f"{self.good} answers, {len(self.done)} actions, of them {refused} refused"

    async def _client(self, seed: int, until_s: float) -> None:
        """Each answer is streamed to its end."""
        rng = random.Random(seed)
        model, changes_s = rng.choice(self.models), time.monotonic() + rng.uniform(2.0, self.changes_s)
        async with httpx.AsyncClient(timeout=self.patience_s) as http:
            while (now_s := time.monotonic()) < until_s:
                if now_s >= changes_s:
                    model, changes_s = rng.choice(self.models), now_s + rng.uniform(2.0, self.changes_s)
                body = chat(model, rng.randint(1, self.tokens), stream=True)
                async with http.stream("POST", f"{self.served.url}/v1/chat/completions", json=body) as response:
                    text = (await response.aread()).decode()
                if response.status_code == 200 and text.rstrip().endswith("data: [DONE]"):
                    self.good += 1
                else:
                    self.failures.append(f"{model}: {response.status_code} … {text[-300:]}")
                await asyncio.sleep(rng.uniform(0.0, CALM_S))

    async def _trouble(self, until_s: float) -> None:
        """Now and then a command of a person, or the end of a worker by SIGKILL."""
        rng = random.Random(SEED)
        of_models = {*self.models, *map(prefill_of, self.models)}
        while time.monotonic() < until_s:
            await asyncio.sleep(rng.uniform(self.troubled_s / 3, self.troubled_s))
            rows = self.served.status()["workers"]
            ready = [row for row in rows if row["component"] in of_models and row["state"] == "ready"]
            if not ready:
                continue
            row, what = rng.choice(ready), rng.choice(self.actions)
            try:
                match what:
                    case "kill":
                        os.kill(row["pid"], signal.SIGKILL)
                    case "more":
                        ask_arbiter(self.served.paths, "dynamo_scale", component=row["component"], target="+1")
                    case _:
                        ask_arbiter(self.served.paths, f"dynamo_{what}", name=row["watcher_name"])
            except (DynamoError, ProcessLookupError) as error:
                self.done.append(f"{what} {row['watcher_name']}: refused: {error}")
            else:
                self.done.append(f"{what} {row['watcher_name']}")
