"""`vllm serve` beside a graph with the same model and options: what one takes the other takes, and answers alike."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.drivers.served import Served
from tests.tools.free_port import free_port
from tests.vllm.hosts import START_TIMEOUT_S, VllmHost
from tests.vllm.oracle.asking import Outcome, ask_both
from tests.vllm.oracle.comparing import difference, plain
from tests.vllm.oracle.report import write
from tests.vllm.oracle.requests import MODEL, cases
from tests.vllm.test_vllm_serve_http import words

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(2400)]

WRITE = "DYN_ORACLE_WRITE"
"""Set it, and docs/vllm_oracle.json says what was found (then run docs/generate.py)."""

API = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes", "enable-prompt-tokens-details": True}


@contextmanager
def vllm_serve(host: VllmHost, port: int, log: Path) -> Iterator[str]:
    """Its URL, once it may be asked for its health."""
    program = [str(Path(sys.executable).with_name("vllm")), "serve", str(host.model)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*program, *where, *words({**host.args, **API})],
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


def with_api(served: Served, folder: Path) -> Served:
    """The same graph, whose API has the options that `vllm serve` is given, and answers plain requests, too."""
    (file,) = folder.glob("*.yaml")
    config = yaml.safe_load(file.read_text())
    config["Processor"]["serve-args"] = API
    config.setdefault("Frontend", {})["plain-requests"] = "engine"
    file.write_text(yaml.safe_dump(config))
    return served


@pytest.mark.parametrize("graph", ["aggregated", "disaggregated"])
async def test_a_graph_answers_as_vllm_serve_does(graph: str, vllm_host: VllmHost, tmp_path: Path) -> None:
    """Every parameter of every endpoint, good, bad and null, streamed and not: status, parameter of an error, and each
    field of the answer; what differs is what is meant to."""
    folder = tmp_path / "graph"
    folder.mkdir()
    served = with_api(getattr(vllm_host, graph)(folder), folder)
    log = tmp_path / "vllm.log"
    with vllm_serve(vllm_host, free_port(), log) as url, served:
        served.start()
        await until_healthy(url, log)
        outcomes = await ask_both(served.url, url, cases())
    if os.environ.get(WRITE):
        import vllm

        write(graph, vllm.__version__, outcomes)
    assert [told(outcome) for outcome in outcomes if bool(outcome.differs) != bool(outcome.case.differs)] == []
    assert sum(outcome.theirs["status"] == 200 for outcome in outcomes) > 300, "what is refused shows little"


def told(outcome: Outcome) -> str:
    """For a failure's message."""
    return f"{outcome.case}: {outcome.differs}"


def test_the_comparison_sees_what_differs():
    """Ids and times are not looked at; a token, a null that is missing, a number, the end of a stream are."""

    def stream(*lines: str) -> dict[str, object]:
        return plain(200, "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")

    def choice(text: str) -> str:
        return f'{{"id": "cmpl-{text}", "created": 1, "choices": [{{"index": 0, "text": "{text}"}}]}}'

    assert difference(stream(choice("a"), choice("b")), stream(choice("ab"))) is None
    assert difference(stream(choice("a"), choice("b")), stream(choice("ac"))) is not None
    assert difference(stream(choice("a"), "[DONE]"), stream(choice("a"))) is not None
    whole = plain(200, b'{"id": "x", "logprob": -1.23456, "user": null}', "application/json")
    assert difference(whole, plain(200, b'{"id": "y", "logprob": -1.23457, "user": null}', "application/json")) is None
    assert difference(whole, plain(200, b'{"id": "y", "logprob": -1.3, "user": null}', "application/json")) is not None
    assert difference(whole, plain(200, b'{"id": "y", "logprob": -1.23456}', "application/json")) is not None
    assert difference(whole, plain(400, b'{"id": "x", "logprob": -1.23456, "user": null}', "application/json"))
