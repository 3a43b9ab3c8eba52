"""`vllm serve` beside a graph with the same model and options: what one takes the other takes, and answers alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.hosts import VllmHost
from tests.vllm.oracle.beside import Setup, compared, unexpected
from tests.vllm.oracle.comparing import difference, plain
from tests.vllm.oracle.report import write_if_asked
from tests.vllm.oracle.requests import cases

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("graph", ["aggregated", "disaggregated"])
async def test_a_graph_answers_as_vllm_serve_does(graph: str, vllm_host: VllmHost, tmp_path: Path) -> None:
    outcomes = await compared(vllm_host, Setup(graph), tmp_path, cases())
    write_if_asked("graphs", graph, outcomes)
    assert unexpected(outcomes) == []
    assert sum(outcome.theirs["status"] == 200 for outcome in outcomes) > 300, "what is refused shows little"


def test_the_comparison_sees_what_differs():
    def stream(*lines: str) -> dict[str, object]:
        return plain(200, "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")

    def choice(text: str) -> str:
        return f'{{"id": "cmpl-{text}", "created": 1, "choices": [{{"index": 0, "text": "{text}"}}]}}'

    assert difference(stream(choice("a"), choice("b")), stream(choice("ab"))) is None
    assert difference(stream(choice("a"), choice("b")), stream(choice("ac"))) is not None
    assert difference(stream(choice("a"), "[DONE]"), stream(choice("a"))) is not None
    half, none = (
        stream(f'{{"choices": [{{"index": 0, "delta": {{"reasoning": "{text}", "content": "{text}"}}}}]}}')
        for text in ("a\\ufffd", "a")
    )
    assert difference(half, none) == 'events.0.0.delta.content: "a\\ufffd" against "a"'
    whole = plain(200, b'{"id": "x", "logprob": -1.23456, "user": null}', "application/json")
    assert difference(whole, plain(200, b'{"id": "y", "logprob": -1.23457, "user": null}', "application/json")) is None
    assert difference(whole, plain(200, b'{"id": "y", "logprob": -1.3, "user": null}', "application/json")) is not None
    assert difference(whole, plain(200, b'{"id": "y", "logprob": -1.23456}', "application/json")) is not None
    tasks = [
        plain(400, f'{{"message": "Supported tasks: {listed}"}}'.encode(), "")
        for listed in ("['a', 'b']", "['b', 'a']")
    ]
    assert difference(*tasks) is None
    assert difference(whole, plain(400, b'{"id": "x", "logprob": -1.23456, "user": null}', "application/json"))
