"""`vllm serve` beside a graph with the same model and options, and both asked the same."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from dynamo_local.engines.vllm.options import words_of
from tests.drivers.served import Served
from tests.tools.free_port import free_port
from tests.vllm.hosts import START_TIMEOUT_S, VllmHost
from tests.vllm.oracle.asking import Outcome, ask_both
from tests.vllm.oracle.requests import MODEL, Case

API = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes", "enable-prompt-tokens-details": True}


@dataclass(frozen=True)
class Setup:
    """Options of vLLM: `worker`'s are the engine's, `api`'s only its API reads. `graph` is a method of `VllmHost`; with
    several `workers` each request goes to the next one."""

    graph: str = "aggregated"
    worker: Mapping[str, Any] = field(default_factory=dict)
    api: Mapping[str, Any] = field(default_factory=lambda: API)
    workers: int = 1


@contextmanager
def vllm_serve(host: VllmHost, setup: Setup, port: int, log: Path) -> Iterator[str]:
    """Its URL, once it may be asked for its health."""
    program = [str(Path(sys.executable).with_name("vllm")), "serve", str(host.model)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*program, *where, *words_of({**host.args, **setup.worker, **setup.api})],
            env={**os.environ, **host.env},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


async def until_healthy(url: str, log: Path) -> None:
    """Raises TimeoutError with what it said last."""
    async with httpx.AsyncClient() as client:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    try:
                        if (await client.get(f"{url}/health")).status_code == 200:
                            return
                    except httpx.TransportError:
                        await asyncio.sleep(0.5)
        except TimeoutError as error:
            raise TimeoutError(log.read_text()[-4000:]) from error


def graph_of(host: VllmHost, setup: Setup, folder: Path) -> Served:
    """The graph, whose API has the options that `vllm serve` is given, and answers plain requests, too."""
    folder.mkdir()
    several = {"workers": setup.workers}
    scaled = several if setup.graph == "disaggregated" else {"ServiceArgs": several}
    served: Served = getattr(host, setup.graph)(folder, **setup.worker, **scaled)
    (file,) = folder.glob("*.yaml")
    config = yaml.safe_load(file.read_text())
    config["Processor"] |= {"serve-args": dict(setup.api), "router": "round-robin"}
    config.setdefault("Frontend", {})["plain-requests"] = "engine"
    file.write_text(yaml.safe_dump(config))
    return served


async def compared(host: VllmHost, setup: Setup, folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    log = folder / "vllm.log"
    with vllm_serve(host, setup, free_port(), log) as url, graph_of(host, setup, folder / "graph") as served:
        served.start()
        await until_healthy(url, log)
        return await ask_both(served.url, url, cases)


def unexpected(outcomes: Sequence[Outcome]) -> list[str]:
    """Differences that are not meant, and equal answers that should differ."""
    return [
        f"{outcome.case}: {outcome.differs}"
        for outcome in outcomes
        if bool(outcome.differs) != bool(outcome.case.differs)
    ]
