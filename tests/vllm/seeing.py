"""A graph's engines, seen from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence

import psutil

from tests.drivers.scaled import events
from tests.drivers.served import Served


def engine_pids(served: Served, watcher: str | None = None) -> list[int]:
    """Pids of what vLLM started: what Python's multiprocessing spawned, and what has a title of vLLM's."""
    mark = f"DYN_WATCHER_NAME={served.namespace}_{watcher}\0".encode() if watcher else b""
    found = []
    for pid, line in served.processes():
        if ("VLLM::" in line or "multiprocessing" in line) and mark in _environ(pid):
            found.append(pid)
    return found


def engine_cores(served: Served) -> list[int]:
    mine = set(engine_pids(served))
    return [pid for pid, line in served.processes() if pid in mine and "EngineCore" in line]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and _status(pid) != psutil.STATUS_ZOMBIE]


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def exit_codes(served: Served, name: str) -> list[int]:
    """One for each ended process of that worker; minus the signal's number where a signal ended it."""
    return [event["exit_code"] for event in events(served, name) if event["event"] == "ProcessExited"]


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def prompt_tokens_by_source(log: str) -> dict[str, int]:
    """From what an engine says of itself when it is closed."""
    found: dict[str, int] = {}
    for line in re.findall(r"prompt tokens by source: (\{.*\})", log):
        for name, count in re.findall(r"'(\w+)': (\d+)", line):
            found[name] = found.get(name, 0) + int(count)
    return found
