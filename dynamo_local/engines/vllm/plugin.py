"""vLLM loads this in every process of an engine (entry point `vllm.general_plugins`): none outlives its worker.

A killed API process orphans EngineCore and its workers for ever (vLLM #55510). `PR_SET_PDEATHSIG` follows the
*thread* that forked; a pidfd follows the process. Outside of a worker of ours this does nothing.
"""

from __future__ import annotations

import os
import select
import signal
import threading

WORKER_PID = "DYN_ENGINE_OF"
"""Set by the worker for what it starts: its own pid."""
NIXL_PAUSE_US = "DYN_NIXL_PAUSE_US"
"""Set by the worker, too: microseconds for which NIXL's progress thread pauses (`engine_resources.let_nixl_pause`)."""

_watching = False


def register() -> None:
    """Called by vLLM, more than once; in the worker itself there is nothing to do."""
    global _watching
    worker = os.environ.get(WORKER_PID)
    if _watching or worker is None or int(worker) == os.getpid():
        return
    _watching = True
    if pause_us := int(os.environ.get(NIXL_PAUSE_US) or 0):
        from dynamo_local.engines.vllm.engine_resources import let_nixl_pause

        let_nixl_pause(pause_us)
    from dynamo_local.engines.vllm import nixl_sleep

    nixl_sleep.install()
    fds = []
    for pid in {int(worker), os.getppid()}:
        try:
            fds.append(os.pidfd_open(pid))
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_with, args=(fds,), name="parent watch", daemon=True).start()


def _end_with(fds: list[int]) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
