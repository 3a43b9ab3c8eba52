"""The cost of a planner for its arbiter, and for how long it holds the arbiter's loop.

CPU: 64 watchers under the load planner, pulls every second, off and on in turn in one run.
The arbiter and its sleeping workers are those of `arbiter_idle`. It samples loads and the prefill queue once a second
whether or not the planner runs (nobody is asked twice). So the difference is the loop, the policy and the log. With
`--no-operation`: sleepers cannot be scaled.

The loop: `HELD_WORKERS` real workers with simulated engines that are kept busy, and each policy in turn; what is told
is the arbiter's own measure of each step (`planner.collector`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.arbiter_idle import WATCHERS, our_arbiter, window
from benchmarks.arbiters import NAMESPACE
from benchmarks.deployment import Folders, folders, served
from benchmarks.deployment import run as dynamo
from benchmarks.frontend import ONE_CHARACTER
from benchmarks.harness import Report, at_most
from benchmarks.load import generate
from dynamo_local.profile.reading import DEFAULT_PROFILE

DISAGGREGATED = (
    "graphs.disagg:Frontend",
    "-f",
    "configs/disagg.yaml",
    f"--VllmWorker.ServiceArgs.workers={WATCHERS - 1 - 8}",
    "--PrefillWorker.ServiceArgs.workers=8",
)
"""With a Frontend, in whose process the Processor is."""
OVERHEAD_TARGET_PERCENT = 0.5
HELD_WORKERS = {"PrefillWorker": 2, "VllmWorker": 6}
"""As many as two cores bear with all of them busy."""
HELD_TARGET_MS = 5.0
HELD_STREAMS, HELD_TOKENS = 48, 100
TARGETS = ("--ttft=500", "--itl=50", f"--profile-results-dir={DEFAULT_PROFILE}", "--throughput-adjustment-interval=4")
POLICIES: Mapping[str, Sequence[str]] = {
    "load": ("--adjustment-interval=4",),
    "sla": TARGETS,
    "throughput-load": (
        *TARGETS,
        "--optimization-target=sla",
        "--enable-load-scaling",
        "--load-adjustment-interval=2",
    ),
    "slo": ("--ttft=500", "--itl=50"),
}
"""Each in a run of its own: what is told is the longest of an arbiter's time."""
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
    for policy in POLICIES:
        _held(report, policy, 8.0 if short else 30.0)
    return report


def _held(report: Report, policy: str, seconds: float) -> None:
    """The longest that a tick, and that asking a source, held the loop of a real arbiter with busy engines."""
    config: dict[str, Any] = {name: {"ServiceArgs": {"workers": count}} for name, count in HELD_WORKERS.items()}
    for name in HELD_WORKERS:
        config[name]["sim"] = ONE_CHARACTER
    config |= {"Host": {"gpus": f"sim:{sum(HELD_WORKERS.values())}"}, "Frontend": {"port": 0}}
    with served("graphs.disagg:Frontend", config) as running:
        dynamo(
            running.folders,
            *("planner", "start", f"--policy={policy}", "--no-operation", "--metric-pulling-interval=0.5"),
            *(f"--max-gpu-budget={sum(HELD_WORKERS.values())}", *POLICIES[policy]),
        )
        plan = {"kind": "streams", "port": running.port, "count": HELD_STREAMS, "tokens": HELD_TOKENS, "pids": {}}
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            generate(plan)
        status = json.loads(dynamo(running.folders, "planner", "status", "--json"))
    if status["failed_ticks"] or not status["decisions"]:
        raise RuntimeError(f"{policy} did not plan: {status}")
    held = status["loop_held_max_ms"]
    workers = sum(HELD_WORKERS.values())
    for clock in ("cpu", "wall"):
        longest = max(held, key=lambda work: float(held[work][clock]))
        target = at_most(HELD_TARGET_MS) if clock == "cpu" else None
        report.add(f"{policy}: loop held at most, {clock} ({longest})", "ms", [held[longest][clock]], target)
    counted = f"{status['pulls']} pulls, {status['decisions']} decisions"
    report.notes.append(f"{policy}: {workers} workers, {counted}: {held}")


def _planner(place: Folders, command: str, interval_s: float) -> None:
    state = json.loads(dynamo(place, "planner", "status", "--json", "--namespace", NAMESPACE))["state"]
    if command == "stop" and state == "stopped":
        return
    options = () if command == "stop" else ("--no-operation", f"--adjustment-interval={interval_s:g}")
    budget = () if command == "stop" else (f"--max-gpu-budget={WATCHERS}",)
    dynamo(place, "planner", command, *options, *budget, "--namespace", NAMESPACE)
