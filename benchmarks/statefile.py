"""How long a statefile commit takes: lock, read, validate, change, validate, write, fsync, replace, fsync the folder.

    python benchmarks/statefile.py [--workers 8 64] [--rounds 50] [--folder PATH] [--json]

Beside it, in the same run and alternating with it, a bare durable write of the same bytes (write, fsync, replace,
fsync of the folder): the ratio says what locking and validating add, whatever the disk. `--folder` picks the
filesystem (default: the home folder, where statefiles live; a tmpfs would make fsync free).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from dynamo_local.core.types import Role, WorkerState, instance_key, watcher_name
from dynamo_local.state import ComponentEntry, EntryResources, State, StateStore, new_run_id

WARM_UP_ROUNDS = 3


def graph(workers: int) -> State:
    """A realistic state: every worker ready, with a device, a lease and two endpoints."""
    components = {}
    for n in range(workers):
        name, lease = watcher_name("dynamo", "VllmWorker", n), 0x694D967DA694EA1A + n
        components[name] = ComponentEntry(
            watcher_name=name,
            component="VllmWorker",
            cwd="/home/user/examples/llm",
            cmd="/venv/bin/python -m dynamo_local.serve.serve_dynamo graphs.disagg:Frontend --service-name VllmWorker",
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


def summary(samples_s: list[float]) -> dict[str, float]:
    """Minimum, median and maximum in milliseconds."""
    return {
        "min_ms": min(samples_s) * 1e3,
        "median_ms": statistics.median(samples_s) * 1e3,
        "max_ms": max(samples_s) * 1e3,
    }


def measure(workers: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Commit and bare write, alternating, for a graph of so many workers."""
    store = StateStore(folder / f"bench{workers}.json")
    store.create(graph(workers))
    data, bare = store.path.read_bytes(), folder / f"bare{workers}.json"
    commits, writes = [], []
    for n in range(WARM_UP_ROUNDS + rounds):
        begin_s = time.perf_counter()
        with store.transaction() as state:
            state.components["dynamo_VllmWorker"].restarts = n + 1
        middle_s = time.perf_counter()
        bare_write(bare, data)
        end_s = time.perf_counter()
        if n >= WARM_UP_ROUNDS:
            commits.append(middle_s - begin_s)
            writes.append(end_s - middle_s)
    commit, write = summary(commits), summary(writes)
    return {
        "workers": workers,
        "bytes": len(data),
        "rounds": rounds,
        "commit": commit,
        "bare_write": write,
        "ratio_of_medians": commit["median_ms"] / write["median_ms"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        "workers    bytes   commit min/median/max ms   bare write min/median/max ms   ratio",
        *(
            f"{row['workers']:7d} {row['bytes']:8d}   {_three(row['commit']):>24s}   {_three(row['bare_write']):>28s}"
            f"   {row['ratio_of_medians']:5.2f}"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def _three(values: dict[str, float]) -> str:
    return f"{values['min_ms']:.2f} / {values['median_ms']:.2f} / {values['max_ms']:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Statefile commit time")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path.home(), help="on the filesystem to measure")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".dynamo-bench-", dir=options.folder) as folder:
        rows = [measure(workers, options.rounds, Path(folder)) for workers in options.workers]
    print(json.dumps(rows, indent=2) if options.json else table(rows))


if __name__ == "__main__":
    main()
