"""Models whose prefill and decode are apart, beside one that is not, on fewer GPUs than they need together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.drivers.models import of_models
from tests.drivers.served import Served, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

MODEL = {"model": "sim-tiny", "engine": "sim", "min-stay-s": 1.0, "idle-s": 2.0, "sim": {"start-up-s": 0.5}}
APART = {**MODEL, "prefill": 1}
PROMPT = "one two three " * 60


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Models a and b are apart, c is not; three GPUs, of which a worker of a or b needs two."""
    with of_models({"a": APART, "b": APART, "c": MODEL}, "sim:3") as graph:
        yield graph.start()


def ask(served: Served, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=120.0)


def components(served: Served) -> set[str]:
    """Those with a ready worker."""
    return {row["component"] for row in served.status()["workers"] if row["state"] == "ready"}


def prefilled(served: Served, model: str) -> bool:
    """One more answer, by a model that has a prefill worker then: to wait without asking would let it go idle."""
    assert ask(served, model).status_code == 200
    return {model, f"{model}_PrefillWorker"} <= components(served)


def test_each_is_answered_and_prefilled_by_its_own(served: Served) -> None:
    for model in "abcab":
        answer = ask(served, model)
        assert (answer.status_code, answer.json().get("model")) == (200, model)
        if model != "c":
            until(lambda model=model: prefilled(served, model), what=served.states)
            other = "b" if model == "a" else "a"
            assert other not in components(served), "three GPUs are one worker of two"
    rows = {row["model"]: row["gpus_per_worker"] for row in served.status()["models"]}
    assert rows == {"a": 2, "b": 2, "c": 1}
    for model in "ab":
        until(lambda model=model: prefilled(served, model) and "Remote prefill: True" in served.log(model))


def test_a_prefill_worker_that_is_killed_costs_no_answer(served: Served) -> None:
    until(lambda: prefilled(served, "a"), what=served.states)
    os.kill(served.worker("a_PrefillWorker")["pid"], signal.SIGKILL)
    assert [ask(served, "a").status_code for _ in range(3)] == [200] * 3


def test_all_gpus_are_given_back(served: Served) -> None:
    assert ask(served, "b").status_code == 200
    until(lambda: all(gpu["state"] == "free" for gpu in served.status()["gpus"]), what=served.states)
    assert served.status()["prefill_queue"]["outstanding"] == 0
