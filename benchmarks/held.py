"""A request for a model that sleeps, on a free GPU: the time to its first token, beside the wake that it waits for.

The model of a section `Models` gives its GPU back after a second without a request. Each request is sent once its
worker sleeps again. The wake is the worker's own: engine, probe, and keys.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

from benchmarks.deployment import Running, first_token, served
from benchmarks.deployment import run as dynamo
from benchmarks.harness import Report, at_most, percentile

TARGET_S = 0.3
"""The first token may come so much later than the wake ends, in one of a hundred."""
MODEL = "a"
SECTION = {
    "model": "sim-tiny",
    "engine": "sim",
    "standby": 0,
    "idle-s": 1.0,
    "min-stay-s": 0.5,
    "sim": {"sleep-s": 0.1, "wake-s": 0.3},
}
AWAKE = re.compile(r"awake after ([\d.]+) s")
PATIENCE_S = 30.0


def run(short: bool) -> Report:
    """So many wakes, one after the other."""
    report = Report("held")
    with served(None, {"Host": {"gpus": "sim:1"}, "Models": {MODEL: SECTION}}) as graph:
        first_token(graph.port, MODEL)  # starts the worker
        took_s, wakes_s = [], []
        for _ in range(10 if short else 100):
            _until(lambda: _sleeps(graph))
            before = len(_wakes(graph))
            began_s = time.perf_counter()
            took_s.append(first_token(graph.port, MODEL) - began_s)
            wakes_s.append(_next_wake(graph, before))
    beyond_s = [took - wake for took, wake in zip(took_s, wakes_s, strict=True)]
    report.add("wake", "s", wakes_s)
    report.add("held request: first token", "s", took_s)
    report.add("first token − wake", "s", beyond_s)
    report.add("first token − wake, p99", "s", [percentile(beyond_s, 0.99)], at_most(TARGET_S))
    return report


def _sleeps(graph: Running) -> bool:
    workers = json.loads(dynamo(graph.folders, "status", "--json"))["workers"]
    return any((each["component"], each["state"]) == (MODEL, "sleeping") for each in workers)


def _wakes(graph: Running) -> list[float]:
    """The wakes so far, in seconds, as the worker's log tells them."""
    logs = (graph.folders.root / "home" / ".dynamo" / "logs").rglob(f"*_{MODEL}.log")
    return [float(found) for log in logs for found in AWAKE.findall(log.read_text(encoding="utf-8"))]


def _next_wake(graph: Running, before: int) -> float:
    """The wake after the first `before`."""
    _until(lambda: len(_wakes(graph)) > before)
    return _wakes(graph)[-1]


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the model did not fall asleep, or awake, within {PATIENCE_S:g} s")
        time.sleep(0.05)
