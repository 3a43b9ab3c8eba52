"""The cost of the page: 64 workers whose loads all change, without a page, with one, and with ten viewers.

The three are measured in turn in one run. A viewer holds the page's stream open and reads it to the end of the window.
How long the arbiter's loop is taken shows in the answers to a question that needs nothing (`numwatchers`): it waits as
long as whatever the loop does.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.arbiter_idle import AGGREGATED, SETTLE_S, WATCHERS, our_arbiter
from benchmarks.arbiters import NAMESPACE
from benchmarks.deployment import DOWN_TIMEOUT_S, Folders, folders
from benchmarks.deployment import run as dynamo
from benchmarks.harness import Report, at_most, percentile
from benchmarks.processes import cpu_s, dynamo_command, rss_mib
from dynamo_local.dashboard.collector import ControlClient
from dynamo_local.dashboard.process import ask_running
from dynamo_local.system.paths import Paths
from tests.drivers.page import readers

VIEWERS = 10
PAGE_TARGET_PERCENT = 1.0
LOOP_TARGET_RATIO = 1.05
ASK_EVERY_S = 0.01
CASES: tuple[tuple[str, int | None], ...] = (("no page", None), ("no viewer", 0), (f"{VIEWERS} viewers", VIEWERS))
"""Name -> viewers of the page; None: there is no page."""


@dataclass(slots=True)
class Seen:
    """The figures of one case, one for each window."""

    arbiter: list[float] = field(default_factory=list)
    page: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    events: int = 0


def run(short: bool) -> Report:
    """CPU of page and arbiter, and how long the arbiter's answers take."""
    report = Report("dashboard")
    rounds, window_s = (3, 3.0) if short else (8, 15.0)
    seen = {name: Seen() for name, _ in CASES}
    memory = 0.0
    with ExitStack() as stack:
        place = stack.enter_context(folders())
        arbiter = stack.enter_context(our_arbiter(place, AGGREGATED, changing=True))
        paths = Paths.of(NAMESPACE, place.env)
        for _ in range(rounds):
            for name, viewers in CASES:
                with ExitStack() as case:
                    page = None if viewers is None else case.enter_context(_page(place, paths))
                    events = case.enter_context(readers(_link(paths) for _ in range(viewers or 0)))
                    time.sleep(SETTLE_S)
                    _window(seen[name], paths, arbiter, page, window_s)
                    memory = max(memory, 0.0 if page is None else rss_mib(page))
                seen[name].events += sum(events)
    if not seen[CASES[-1][0]].events:
        raise RuntimeError("no viewer saw an event")
    _add(report, seen, memory)
    return report


def _add(report: Report, seen: dict[str, Seen], memory: float) -> None:
    without, *others = (name for name, _ in CASES)
    for name in others:
        last = at_most(PAGE_TARGET_PERCENT) if name == others[-1] else None
        report.add(f"page, {name}: CPU", "% core", seen[name].page, last)
    for name, found in seen.items():
        report.add(f"arbiter, {name}: CPU", "% core", found.arbiter)
    for name, found in seen.items():
        report.add(f"arbiter's answer, {name}: p50", "ms", found.p50_ms)
        report.add(f"arbiter's answer, {name}: p99", "ms", found.p99_ms)
    ratios = [a / b for a, b in zip(seen[others[-1]].p99_ms, seen[without].p99_ms, strict=True)]
    report.add(f"arbiter's answer, p99: {others[-1]} ÷ {without}", "×", ratios, at_most(LOOP_TARGET_RATIO))
    report.add("page: memory", "MiB", [memory])
    report.notes.append(f"{WATCHERS} watchers; all loads change each second; the page asks the arbiter once a second")
    share = statistics.median(seen[others[-1]].arbiter) - statistics.median(seen[without].arbiter)
    report.notes.append(
        f"the page's question costs the arbiter {share:+.2f} % of a core, however many viewers there are"
    )


def _window(seen: Seen, paths: Paths, arbiter: int, page: int | None, window_s: float) -> None:
    """Ask the arbiter for so long, and take the CPU time of both."""
    client = ControlClient(paths)
    try:
        client.ask("numwatchers")
        began_s = time.perf_counter()
        before = {pid: cpu_s(pid) for pid in (arbiter, page) if pid is not None}
        answers = answers_ms(client, window_s)
        took_s = time.perf_counter() - began_s
        used = {pid: 100 * (cpu_s(pid) - value) / took_s for pid, value in before.items()}
    finally:
        client.close()
    seen.arbiter.append(used[arbiter])
    if page is not None:
        seen.page.append(used[page])
    seen.p50_ms.append(statistics.median(answers))
    seen.p99_ms.append(percentile(answers, 0.99))


def answers_ms(client: ControlClient, window_s: float) -> list[float]:
    """How long the arbiter's answers take that need nothing, asked for so many seconds."""
    found, began_s = list[float](), time.perf_counter()
    while (now_s := time.perf_counter()) - began_s < window_s:
        client.ask("numwatchers")
        found.append(1_000 * (time.perf_counter() - now_s))
        time.sleep(ASK_EVERY_S)
    return found


@contextmanager
def _page(place: Folders, paths: Paths) -> Iterator[int]:
    """The page's process, as `dynamo dashboard` starts it; gives its pid."""
    command = dynamo_command("dashboard", "-n", NAMESPACE)
    with subprocess.Popen(command, env=place.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + DOWN_TIMEOUT_S
            while ask_running(paths) is None:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the page did not start: {dynamo(place, 'status', '-n', NAMESPACE)}")
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()
            process.wait(DOWN_TIMEOUT_S)


def _link(paths: Paths) -> str:
    """A new link of the page."""
    found = ask_running(paths)
    if found is None:
        raise RuntimeError("the page is gone")
    return str(found["url"])
