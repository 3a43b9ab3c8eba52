"""The use of a process, and where our own are started from."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
"""Where `python -m benchmarks.…` finds this package."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process with all its threads, dead ones included, to the nanosecond. ProcessLookupError.

    /proc/PID/stat counts in hundredths of a second, a whole percent of a one-second window. The clock id is
    Linux's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED), what clock_getcpuclockid(3) returns.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"no process {pid} to read the CPU time of") from error


def rss_mib(pid: int) -> float:
    """Resident memory, shared pages included, MiB."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def clean_env() -> dict[str, str]:
    """The caller's environment without what would make a deployment differ from a user's first one.

    Where byte code is forbidden, as a user's shell does not, each start would compile this project again.
    """
    dropped = {"ETCD_ENDPOINTS", "NATS_SERVER", "PYTHONDONTWRITEBYTECODE", "NOTIFY_SOCKET", "CUDA_VISIBLE_DEVICES"}
    return {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("DYN")}


def module_command(module: str, *words: str) -> list[str]:
    """Run one of this package's modules in a process of its own, from `ROOT`."""
    return [sys.executable, "-m", module, *words]


def dynamo_command(*words: str) -> list[str]:
    """The console script of this environment, as a user runs it. FileNotFoundError where it is not installed."""
    script = Path(sys.executable).with_name("dynamo")
    if not script.exists():
        raise FileNotFoundError(f"{script}: install the project into this environment first (pip install -e .[dev])")
    return [str(script), *words]
