"""vLLM's CPU build with NIXL, several engines on one host. What it does there fits one engine with cores to spare:

* NIXL's progress thread looks for news without a pause: each engine, also an idle one, keeps a core busy. It polls
  descriptors that wake it, so a pause costs no time: with one of a millisecond it takes 1.5 % of a core.
* NixlConnector lets the thread that computes run on the last core of each NUMA node alone. Thus all engines of a host
  share that one core, and their hand-offs took up to fifteen seconds on a busy machine of two.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

import psutil

log = logging.getLogger(__name__)

BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def let_nixl_pause(pause_us: int) -> None:
    """In a process of an engine, before NIXL is used. Nothing where NIXL is not there, or is another one."""
    # As vLLM does it before it imports NIXL, which it will find imported.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        import nixl._api as api
    except ImportError:
        return
    made: Any = api.nixlBind.nixlAgentConfig
    if not hasattr(made, "pthrDelay"):
        return

    class Pausing(made):  # type: ignore[misc]
        """`_api` writes 0, which is a loop without an end."""

        @property
        def pthrDelay(self) -> int:
            return int(made.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:
            made.pthrDelay.__set__(self, value or pause_us)

    api.nixlBind.nixlAgentConfig = Pausing


def unpin(pids: Iterable[int]) -> None:
    """Let every thread of these processes, and of what they have started, run wherever this process may. Only where
    vLLM was told to bind none."""
    if os.environ.get(BINDING) != "nobind" or not sys.platform.startswith("linux"):
        return
    allowed = os.sched_getaffinity(0)
    freed = 0
    for pid in pids:
        for each in _with_descendants(pid):
            for thread in _threads(each):
                try:
                    if os.sched_getaffinity(thread) < allowed:
                        os.sched_setaffinity(thread, allowed)
                        freed += 1
                except OSError:  # it has ended meanwhile
                    continue
    if freed:
        log.info("%d threads of the engine, which its connector had bound to one core, may use all of ours", freed)


def _with_descendants(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
