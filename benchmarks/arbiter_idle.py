"""The cost of an arbiter that has nothing to do: `dynamo serve`'s beside a plain circus arbiter, 64 watchers each.

Both run at once and are measured in the same windows of time, so both see the same machine. Then the same with the
workers of 24 models that share the GPUs. `benchmarks.arbiters` says what the workers are.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.arbiters import NAMESPACE
from benchmarks.deployment import DOWN_TIMEOUT_S, EXAMPLE, START_TIMEOUT_S, Folders, down, folders
from benchmarks.deployment import run as dynamo
from benchmarks.harness import Report, at_most
from benchmarks.processes import ROOT, cpu_s, module_command, rss_mib

WATCHERS = 64
CPU_TARGET_PERCENT = 1.0
MEMORY_TARGET_MIB = 96.0
AGGREGATED = ("graphs.agg:Frontend", "-f", "configs/agg.yaml", f"--VllmWorker.ServiceArgs.workers={WATCHERS - 1}")
"""With a Frontend, in whose process the Processor is."""
MODELS = 24
SETTLE_S = 1.0
"""After the start: imports, garbage and buffers of the start are not idling."""


def run(short: bool) -> Report:
    """CPU and memory of both. Windows are whole seconds: both arbiters wake once a second."""
    report = Report("arbiter_idle")
    windows, window_s = (3, 2.0) if short else (6, 10.0)
    with ExitStack() as stack:
        place = stack.enter_context(folders())
        plain = stack.enter_context(_plain_circus(place.root))
        ours = stack.enter_context(our_arbiter(place, AGGREGATED))
        time.sleep(SETTLE_S)
        used = [window({"ours": ours, "circus": plain}, window_s) for _ in range(windows)]
        memory = {name: [rss_mib(pid)] for name, pid in (("ours", ours), ("circus", plain))}
    with folders() as place, our_arbiter(place, ("-f", str(_models(place)))) as ours:
        time.sleep(SETTLE_S)
        of_models = [window({"ours": ours}, window_s)["ours"] * 100 for _ in range(windows)]
    percent = {name: [u[name] * 100 for u in used] for name in ("ours", "circus")}
    what = f"{WATCHERS} watchers"
    report.add(f"{what}: CPU, dynamo serve", "% core", percent["ours"], at_most(CPU_TARGET_PERCENT))
    report.add(f"{what}: CPU, plain circus", "% core", percent["circus"])
    differences = [a - b for a, b in zip(percent["ours"], percent["circus"], strict=True)]
    report.add(f"{what}: CPU, difference", "% core", differences)
    report.add(f"{what} of {MODELS} models: CPU, dynamo serve", "% core", of_models, at_most(CPU_TARGET_PERCENT))
    report.add(f"{what}: memory, dynamo serve", "MiB", memory["ours"], at_most(MEMORY_TARGET_MIB))
    report.add(f"{what}: memory, plain circus", "MiB", memory["circus"])
    report.notes.append(f"windows of {window_s:g} s; dynamo serve samples loads and follows logs, circus does neither")
    return report


def _models(place: Folders) -> Path:
    """A section `Models`: with the Frontend there are as many processes as in `AGGREGATED`."""
    fewest, more = divmod(WATCHERS - 1, MODELS)
    models = {f"m{n}": {"model": "sim-tiny", "engine": "sim", "floor": fewest + (n < more)} for n in range(MODELS)}
    path = place.root / "models.yaml"
    path.write_text(yaml.safe_dump({"Models": models}), encoding="utf-8")
    return path


def window(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Share of a core that each used in the next so many seconds."""
    begin_s = time.perf_counter()
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    took_s = time.perf_counter() - begin_s
    return {name: value / took_s for name, value in used.items()}


@contextmanager
def our_arbiter(place: Folders, graph: Sequence[str], *, changing: bool = False) -> Iterator[int]:
    """`dynamo serve GRAPH` in the foreground with `WATCHERS` sleeping workers, all ready; gives its pid.

    `changing`: the loads of all workers change each second.
    """
    words = [*graph, "--gpus", f"sim:{WATCHERS}", "--namespace", NAMESPACE]
    command = module_command("benchmarks.arbiters", "ours", *words)
    env = {**place.env, "PYTHONPATH": str(ROOT)}
    log = place.root / "arbiter.out"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=EXAMPLE, env=env, stdout=output, stderr=output) as arbiter,
    ):
        try:
            with _stand_in(place, changing) as stand_in:
                _until_ready(place, {log: arbiter, place.root / "stand-in.err": stand_in})
                yield arbiter.pid
                statuses = json.loads(dynamo(place, "status", "--json", "--namespace", NAMESPACE))["workers"]
                without_load = [worker["watcher_name"] for worker in statuses if worker["load"] is None]
                if without_load:
                    raise RuntimeError(f"{len(without_load)} of {len(statuses)} workers showed no load")
                down(place)
        finally:
            arbiter.terminate()
            arbiter.wait(DOWN_TIMEOUT_S)


@contextmanager
def _stand_in(place: Folders, changing: bool) -> Iterator[subprocess.Popen[str]]:
    statefile = place.root / "home" / ".dynamo" / "state" / f"{NAMESPACE}.json"
    command = module_command(
        "benchmarks.arbiters", "changing" if changing else "stand-in", str(statefile), str(WATCHERS)
    )
    with _until_closed(command, place.root / "stand-in.err") as process:
        yield process


@contextmanager
def _plain_circus(root: Path) -> Iterator[int]:
    folder = root / "circus"
    folder.mkdir()
    with _until_closed(
        module_command("benchmarks.arbiters", "circus", str(folder), str(WATCHERS)), folder / "err"
    ) as p:
        assert p.stdout is not None
        if p.stdout.readline().strip() != "ready":
            raise RuntimeError(f"circus did not start: {(folder / 'err').read_text()}")
        yield p.pid


@contextmanager
def _until_closed(command: Sequence[str], errors: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that ends when its standard input closes."""
    with (
        errors.open("w") as file,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(DOWN_TIMEOUT_S)


def _until_ready(place: Folders, processes: Mapping[Path, subprocess.Popen[Any]]) -> None:
    """RuntimeError with the words of a process that ends first, or of all at the deadline."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _ready(place):
        if time.monotonic() > deadline_s or any(process.poll() is not None for process in processes.values()):
            raise RuntimeError(f"{WATCHERS} watchers were not ready: " + "".join(log.read_text() for log in processes))
        time.sleep(0.1)


def _ready(place: Folders) -> bool:
    try:
        return bool(json.loads(dynamo(place, "status", "--json", "--namespace", NAMESPACE))["state"] == "ready")
    except RuntimeError:
        return False  # it does not listen yet
