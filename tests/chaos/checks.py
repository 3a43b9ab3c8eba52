"""Conditions that hold at every moment of a chaos run, read from outside: the statefile, /proc, the event log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.marks import marked
from dynamo_local.errors import StateError
from dynamo_local.state.store import load
from dynamo_local.system.paths import Paths

NEVER = ("StartDeadlinePassed", "DrainDeadlinePassed", "Faulted", "SpawnFailed")
"""Events that no fault of the plan explains."""


def statefile_faults(path: Path) -> list[str]:
    """Not there, not valid, or a GPU that two entries hold."""
    try:
        state = load(path)
    except StateError as error:
        return [f"the statefile: {error}"]
    holders: dict[str, list[str]] = defaultdict(list)
    for name, entry in state.components.items():
        for uuid in entry.resources.gpu_uuids or []:
            holders[uuid].append(name)
    return [f"the statefile: {uuid} is held by {names}" for uuid, names in holders.items() if len(names) > 1]


def process_faults(paths: Paths) -> list[str]:
    """Two live processes of one worker, or on one GPU, whatever the statefile says: but for those that sleep, whose
    GPU may be another's."""
    by_name: dict[str, list[int]] = defaultdict(list)
    by_gpu: dict[str, list[int]] = defaultdict(list)
    asleep = _asleep(paths.statefile)
    for found in marked(paths):
        if found.is_worker:
            by_name[found.name].append(found.pid)
            for uuid in _devices(found.pid):
                by_gpu[uuid].append(found.pid)
    asleep |= _asleep(paths.statefile)  # who has fallen asleep meanwhile, too
    by_gpu = {uuid: [pid for pid in pids if pid not in asleep] for uuid, pids in by_gpu.items()}
    return [f"{what} has the processes {pids}" for what, pids in [*by_name.items(), *by_gpu.items()] if len(pids) > 1]


def _asleep(statefile: Path) -> set[int]:
    try:
        entries = load(statefile).components.values()
    except StateError:  # `statefile_faults` says so
        return set()
    sleepers = (entry for entry in entries if entry.standby is not None and entry.standby.gpu_uuids is not None)
    return {entry.pid for entry in sleepers if entry.pid is not None}


def _devices(pid: int) -> list[str]:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    values = [item.partition(b"=")[2] for item in environ if item.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return [uuid for value in values for uuid in value.decode().split(",") if uuid]


def unexplained(records: Iterable[Mapping[str, Any]], hurt: set[int], outage: Callable[[float], bool]) -> list[str]:
    """Processes that the event log shows to end without an order and without a fault of ours, and worse.

    `outage` says whether something that a start needs (etcd, NATS, room, descriptors) was missing at a time (seconds
    since 1970): a start may fail of that.
    """
    found = []
    ordered: set[str] = set()
    pids: dict[str, int] = {}
    hung: dict[str, str] = {}
    for record in records:
        name, event = record["watcher_name"], record["event"]
        if event == "Spawned":
            pids[name] = record["pid"]
            hung.pop(name, None)
        elif event == "HealthFailed":
            hung[name] = f": {record['reason']}"
        elif event == "Flipped":
            was = record["was"]
            if was in pids:
                pids[name] = pids.pop(was)
            if was in ordered:
                ordered.remove(was)
                ordered.add(name)
        elif event == "DrainRequested":
            ordered.add(name)
        elif event == "DrainCancelled":
            ordered.discard(name)
        elif event == "ProcessExited":
            failed_start = record["from"] == "starting" and outage(record["time"])
            pid = pids.get(name)
            if pid not in hurt and name not in ordered and not failed_start:
                why = f"exit code {record['exit_code']}, seq {record['seq']}{hung.get(name, '')}"
                found.append(f"{name} (pid {pid}) ended unasked, {why}")
            ordered.discard(name)
        elif event == "SpawnFailed" and (name in ordered or outage(record["time"])):
            ordered.discard(name)  # one that was to leave before its process had begun
        elif event in NEVER and record["stimulus_id"] != "health":  # a hung one is ended: its exit is looked at
            found.append(f"{name}: {event}, seq {record['seq']}: {record}")
    return found
