"""How long a statefile commit takes: lock, read, validate, change, validate, write, fsync, replace, fsync the folder.

Beside it, in the same run and alternating with it, a bare durable write of the same bytes (write, fsync, replace,
fsync of the folder). The ratio says what locking and validating add, whatever the disk. Written in the home folder,
where statefiles live; a tmpfs would make fsync free.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Report
from dynamo_local.core.types import Role, WorkerState, instance_key, watcher_name
from dynamo_local.state.run_id import new_run_id
from dynamo_local.state.schema import ComponentEntry, EntryResources, State
from dynamo_local.state.store import StateStore

WARM_UP_ROUNDS = 3
WORKERS = (8, 64)


def run(short: bool) -> Report:
    """Milliseconds per commit and per bare write, for graphs of 8 and of 64 workers."""
    report = Report("statefile")
    with tempfile.TemporaryDirectory(prefix=".dynamo-bench-", dir=Path.home()) as folder:
        for workers in WORKERS:
            commits_ms, writes_ms, size_bytes = measure(workers, 20 if short else 100, Path(folder))
            what = f"{workers} workers"
            report.add(f"{what}: commit", "ms", commits_ms)
            report.add(f"{what}: bare durable write", "ms", writes_ms)
            ratios = (commit / write for commit, write in zip(commits_ms, writes_ms, strict=True))
            report.add(f"{what}: commit ÷ bare write", "", ratios)
            report.notes.append(f"{what}: {size_bytes:,} bytes")
    return report


def graph(workers: int) -> State:
    """A realistic state: every worker ready, with a device, a lease and two endpoints."""
    components = {}
    for n in range(workers):
        name, lease = watcher_name("dynamo", "VllmWorker", n), 0x694D967DA694EA1A + n
        components[name] = ComponentEntry(
            watcher_name=name,
            component="VllmWorker",
            cwd="/home/user/examples/llm",
            cmd="/venv/bin/python -m dynamo_local.worker.serve_dynamo graphs.disagg:Frontend --service-name VllmWorker",
            resources=EntryResources(allocated_gpus=[str(n)], gpu_uuids=[f"GPU-sim00000-0000-0000-0000-{n:012d}"]),
            gpus_per_worker=1,
            role=Role.DECODE,
            state=WorkerState.READY,
            pid=4711 + n,
            pid_start_time=123456.78,
            lease=f"{lease:x}",
            endpoints=[instance_key("dynamo", "VllmWorker", name, lease) for name in ("generate", "load_metrics")],
            started_at=1_732_000_000.5,
            log_file=f"/home/user/.dynamo/logs/dynamo/{name}.log",
        )
    return State(namespace="dynamo", run_id=new_run_id(), components=components)


def bare_write(path: Path, data: bytes) -> None:
    """The least that is durable and atomic."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def measure(workers: int, rounds: int, folder: Path) -> tuple[list[float], list[float], int]:
    """Commits and bare writes, alternating, in milliseconds, for a graph of so many workers; and the file's bytes."""
    store = StateStore(folder / f"bench{workers}.json")
    store.create(graph(workers))
    data, bare = store.path.read_bytes(), folder / f"bare{workers}.json"
    commits_ms, writes_ms = [], []
    for n in range(WARM_UP_ROUNDS + rounds):
        begin_s = time.perf_counter()
        with store.transaction() as state:
            state.components["dynamo_VllmWorker"].restarts = n + 1
        middle_s = time.perf_counter()
        bare_write(bare, data)
        end_s = time.perf_counter()
        if n >= WARM_UP_ROUNDS:
            commits_ms.append((middle_s - begin_s) * 1e3)
            writes_ms.append((end_s - middle_s) * 1e3)
    return commits_ms, writes_ms, len(data)
