"""What the load planner costs its arbiter: 64 watchers, pulls every second, off and on in turn in one run.

The arbiter and its sleeping workers are those of `arbiter_idle`. It samples loads and the prefill queue once a second
whether or not the planner runs (nobody is asked twice), so the difference is the loop, the policy and the log. With
`--no-operation`: sleepers cannot be scaled.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

from benchmarks.arbiter_idle import WATCHERS, our_arbiter, window
from benchmarks.arbiters import NAMESPACE
from benchmarks.deployment import Folders, folders
from benchmarks.deployment import run as dynamo
from benchmarks.harness import Report, at_most

DISAGGREGATED = (
    "graphs.disagg:Frontend",
    "-f",
    "configs/disagg.yaml",
    f"--VllmWorker.ServiceArgs.workers={WATCHERS - 2 - 8}",
    "--PrefillWorker.ServiceArgs.workers=8",
)
"""With a Frontend and a Processor."""
OVERHEAD_TARGET_PERCENT = 0.5
SETTLE_S = 1.5
"""After a change: the command's own cost is none of the loop's."""


def run(short: bool) -> Report:
    """CPU of the arbiter with the planner stopped and running. A decision falls into every window."""
    report = Report("planner_loop")
    rounds, window_s = (3, 3.0) if short else (8, 10.0)
    percent: dict[str, list[float]] = {"stop": [], "start": []}
    with ExitStack() as stack:
        place = stack.enter_context(folders())
        pid = stack.enter_context(our_arbiter(place, DISAGGREGATED))
        for _ in range(rounds):
            for command, found in percent.items():
                _planner(place, command, window_s)
                time.sleep(SETTLE_S)
                found.append(100 * window({"arbiter": pid}, window_s)["arbiter"])
        counts = json.loads(dynamo(place, "planner", "status", "--json", "--namespace", NAMESPACE))
        _planner(place, "stop", window_s)
    if counts["failed_ticks"] or not counts["decisions"]:
        raise RuntimeError(f"the planner did not plan: {counts}")
    what = f"{WATCHERS} watchers, pulls every 1 s"
    report.add(f"{what}: CPU, planner off", "% core", percent["stop"])
    report.add(f"{what}: CPU, planner on", "% core", percent["start"])
    more = [on - off for off, on in zip(percent["stop"], percent["start"], strict=True)]
    report.add(f"{what}: CPU, difference", "% core", more, at_most(OVERHEAD_TARGET_PERCENT))
    report.notes.append(f"windows of {window_s:g} s; {counts['pulls']} pulls, {counts['decisions']} decisions")
    return report


def _planner(place: Folders, command: str, interval_s: float) -> None:
    state = json.loads(dynamo(place, "planner", "status", "--json", "--namespace", NAMESPACE))["state"]
    if command == "stop" and state == "stopped":
        return
    options = () if command == "stop" else ("--no-operation", f"--adjustment-interval={interval_s:g}")
    budget = () if command == "stop" else (f"--max-gpu-budget={WATCHERS}",)
    dynamo(place, "planner", command, *options, *budget, "--namespace", NAMESPACE)
