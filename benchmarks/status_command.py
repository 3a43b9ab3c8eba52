"""`dynamo status` as a process, beside the least that a Python process takes (`python -c pass`) and `dynamo --version`.

The four commands run in turn, so that ratios hold when the machine's speed drifts. Wall time, from before the process
is made to after it was reaped, its output read.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.deployment import served
from benchmarks.harness import Report, at_most
from benchmarks.processes import dynamo_command

TARGET_MS = 400.0
CONFIG = {"Host": {"gpus": "sim:8"}, "Frontend": {"port": 0}}


def run(short: bool) -> Report:
    """Milliseconds per command, with the example's disaggregated graph running."""
    report = Report("status_command")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "dynamo --version": dynamo_command("--version"),
        "dynamo status": dynamo_command("status"),
        "dynamo status --json": dynamo_command("status", "--json"),
    }
    took: dict[str, list[float]] = {name: [] for name in commands}
    with served("graphs.disagg:Frontend", CONFIG) as graph:
        for n in range(1 + (5 if short else 20)):
            for name, command in commands.items():
                took_ms = _run_ms(command, graph.folders.env)
                if n > 0:  # the first round warms the page cache
                    took[name].append(took_ms)
    for name, values in took.items():
        report.add(name, "ms", values, at_most(TARGET_MS) if "status" in name else None)
    bare = took["python -c pass"]
    ratios = (status / least for status, least in zip(took["dynamo status"], bare, strict=True))
    report.add("dynamo status ÷ python -c pass", "", ratios)
    return report


def _run_ms(command: list[str], env: dict[str, str]) -> float:
    begin_s = time.perf_counter()
    subprocess.run(command, env=env, capture_output=True, check=True, timeout=30.0)
    return (time.perf_counter() - begin_s) * 1e3
