"""A large graph on one host: 62 workers with simulated engines behind one Frontend, and 2,000 streams at once.

Each stream gets a token about once a second, so that two cores carry them. Meanwhile the arbiter is asked what needs
nothing (`numwatchers`): the answer waits as long as whatever its loop does. `scale` is asked for one worker more, and
one fewer: its answer comes once the step is decided.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.arbiter_idle import window
from benchmarks.dashboard import answers_ms
from benchmarks.deployment import Running, served
from benchmarks.frontend import ONE_CHARACTER
from benchmarks.harness import Report, at_most, percentile
from benchmarks.load import generate
from dynamo_local.dashboard.collector import ControlClient
from dynamo_local.system.paths import Paths

WORKERS = 62
STREAMS = 2000
TOKENS = 40
SPEED = 0.006
"""The engine's gaps are about a second."""
START_TIMEOUT_S = 300.0
RISE_S = 8.0
"""All streams have begun after so long."""
WINDOW_S = 12.0
STEPS = ("+1", "-1")
LOOP_P99_MS, SCALE_MS, CPU_PERCENT = 20.0, 50.0, 2.0
CONFIG: dict[str, Any] = {
    "Common": {"model": "sim-tiny", "sim": {**ONE_CHARACTER, "speed": SPEED}},
    "Host": {"gpus": f"sim:{WORKERS + 2}"},
    "Frontend": {"port": 0, "served-model-name": "sim-tiny"},
    "Processor": {"common-configs": ["model"]},
    "VllmWorker": {"common-configs": ["model", "sim"], "ServiceArgs": {"workers": WORKERS, "resources": {"gpu": 1}}},
}


def run(short: bool) -> Report:
    """Two windows; the short form has one, with an eighth of the streams."""
    report = Report("large")
    count, windows = (STREAMS // 8, 1) if short else (STREAMS, 2)
    with served("graphs.agg:Frontend", CONFIG, start_timeout_s=START_TIMEOUT_S) as running:
        found = [_window(running, count) for _ in range(windows)]
    name = f"{WORKERS} workers, {count} streams"
    report.add(f"{name}: tokens/s", "1/s", [each["tokens_per_s"] for each in found])
    report.add(f"{name}: arbiter's CPU", "% core", [each["cpu"] for each in found], at_most(CPU_PERCENT))
    report.add(f"{name}: arbiter's answer, p50", "ms", [each["p50_ms"] for each in found])
    report.add(f"{name}: arbiter's answer, p99", "ms", [each["p99_ms"] for each in found], at_most(LOOP_P99_MS))
    scaled = [each[f"scale {step}"] for each in found for step in STEPS]
    report.add(f"{name}: `scale` answered", "ms", scaled, at_most(SCALE_MS))
    report.notes.append("answers include the wait for a core; each stream has all its tokens, or the run fails")
    return report


def _window(running: Running, count: int) -> dict[str, float]:
    plan = {"kind": "streams", "port": running.port, "count": count, "tokens": TOKENS, "pids": {}}
    with ThreadPoolExecutor(1) as aside:
        load = aside.submit(generate, plan)
        time.sleep(RISE_S)
        found = _asked(running)
        wall_s = load.result()["wall_s"]
    return {**found, "tokens_per_s": count * TOKENS / wall_s}


def _asked(running: Running) -> dict[str, float]:
    """The arbiter's CPU while nobody asks; then its answers."""
    used = window({"arbiter": running.status["arbiter_pid"]}, WINDOW_S)["arbiter"]
    client = ControlClient(Paths.of(running.status["namespace"], running.folders.env))
    try:
        client.ask("numwatchers")
        answers = answers_ms(client, WINDOW_S)
        scaled = {f"scale {step}": _scaled(client, step) for step in STEPS}
    finally:
        client.close()
    p99_ms = percentile(answers, 0.99)
    return {"cpu": 100 * used, "p50_ms": statistics.median(answers), "p99_ms": p99_ms, **scaled}


def _scaled(client: ControlClient, target: str) -> float:
    """Milliseconds until a step is answered."""
    began_s = time.perf_counter()
    client.ask("dynamo_scale", component="VllmWorker", target=target)
    return 1_000 * (time.perf_counter() - began_s)
