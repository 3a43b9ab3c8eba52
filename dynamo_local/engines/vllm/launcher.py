"""Starts EngineCore by a fork of a prewarmed process, which has imported vLLM already.

vLLM itself uses `spawn`, which imports everything again (7 s), or `fork`, which is unsafe in a worker with threads, an
event loop and connections. So the fork comes first. A prewarmed process calls `prepare` just before it becomes a
worker. It then has one thread and has touched no device. The child, the *launcher*, waits for the worker's
configuration. Then
the launcher calls vLLM's `launch_core_engines`, as `vllm serve` does with several API servers: one process launches the
engine, and the others are its clients (`client_addresses`). vLLM's method is `fork` there. If a device is initialised
already, vLLM falls back to `spawn`.

EngineCore is the launcher's child, and the launcher ends with the worker.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from dynamo_local.system.prctl import set_parent_death_signal

log = logging.getLogger(__name__)

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PARAMETERS = ("vllm_config", "executor_class", "log_stats", "addresses")
"""Parameters of `launch_core_engines` that this module uses."""
LAUNCHED_TIMEOUT_S = 30.0
"""To fork takes milliseconds, on a busy host a second."""
_GRACE_S = 2.0

_prepared: CoreLauncher | None = None


class CoreLauncher:
    """The worker's end. `pid` is the launcher's, `core_pids` are those of what it launched."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.core_pids: tuple[int, ...] = ()
        self._connection = connection

    def launch(self, config: Any, executor_class: Any, folder: Path) -> dict[str, str]:
        """Request the start of EngineCore, which then starts in the background. Blocks.

        Returns the `client_addresses` for `AsyncLLM`. Raises `RuntimeError` with the reason of a refusal.
        """
        addresses = {"input_address": f"ipc://{folder / 'input'}", "output_address": f"ipc://{folder / 'output'}"}
        order = {"environ": dict(os.environ), "addresses": addresses, "config": pickle.dumps((config, executor_class))}
        try:
            self._connection.send(order)
            if not self._connection.poll(LAUNCHED_TIMEOUT_S):
                raise RuntimeError(f"EngineCore was not launched within {LAUNCHED_TIMEOUT_S:g} s")
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            raise RuntimeError(f"the process that launches EngineCore has ended: {error}") from error
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        self.core_pids = tuple(answer["pids"])
        return addresses

    def watch(self, failed: Callable[[str], None]) -> None:
        """Call `failed`, in a thread, if EngineCore does not come up."""
        threading.Thread(target=self._watch, args=(failed,), name="EngineCore launch", daemon=True).start()

    def _watch(self, failed: Callable[[str], None]) -> None:
        try:
            answer = self._connection.recv()
        except (OSError, EOFError):
            failed("the process that launches EngineCore has ended")
            return
        if "failed" in answer:
            failed(answer["failed"])

    def end(self, timeout_s: float) -> None:
        """End EngineCore as vLLM does, in `timeout_s` or by force, and then the launcher. Blocks."""
        try:
            self._connection.send({"end": timeout_s})
        except OSError:
            pass  # it has ended already
        with _pidfd(self.pid) as gone:
            if gone is not None and not wait([gone], timeout_s + _GRACE_S):
                os.kill(self.pid, signal.SIGKILL)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass


class _pidfd:
    """Readable when the process is gone; None if it was gone before."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    def __enter__(self) -> int | None:
        return self._fd

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


def prepare() -> None:
    """Fork the launcher. To be called in a process with one thread that has vLLM imported; else nothing is done, and
    vLLM starts EngineCore in its own way."""
    global _prepared
    why_not = _why_not()
    if why_not is not None:
        log.info("EngineCore will be started by vLLM itself: %s", why_not)
        return
    ours, theirs = Pipe()
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            set_parent_death_signal(signal.SIGKILL, worker)
            code = _launcher(theirs)
        except BaseException:
            log.exception("the process that launches EngineCore failed")
        finally:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    theirs.close()
    _prepared = CoreLauncher(pid, ours)


def _why_not() -> str | None:
    if os.environ.get(METHOD) == "spawn":
        return f"{METHOD} is spawn"
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"this process has {threads} threads, and a fork would keep one"
    from vllm.v1.engine.utils import launch_core_engines

    if tuple(inspect.signature(launch_core_engines).parameters) != PARAMETERS:
        return "this version of vLLM launches its engines in another way"
    return None


def take(config: Any) -> CoreLauncher | None:
    """The launcher, once, if there is one and it can launch such an engine; None: vLLM is to do it."""
    global _prepared
    launcher, _prepared = _prepared, None
    parallel = config.parallel_config
    if launcher is not None and (parallel.data_parallel_size > 1 or getattr(parallel, "numa_bind", False)):
        log.info("EngineCore is started by vLLM itself: it has several ranks, or is bound to NUMA nodes")
        launcher.end(0.0)
        return None
    return launcher


def _launcher(worker: Connection) -> int:
    """The child. It has a copy of the spare's modules, and no thread but this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        order: Mapping[str, Any] = worker.recv()
    except EOFError:
        return 0
    if "end" in order:
        return 0
    os.environ.clear()
    os.environ.update(order["environ"])
    os.environ[METHOD] = "fork"
    from vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines

    config, executor_class = pickle.loads(order["config"])
    addresses = EngineZmqAddresses(
        inputs=[order["addresses"]["input_address"]], outputs=[order["addresses"]["output_address"]]
    )
    try:
        with launch_core_engines(config, executor_class, True, addresses) as launched:
            manager: Any = launched.engine_manager
            worker.send({"pids": [process.pid for process in manager.processes]})
        worker.send({"ready": True})
    except Exception as error:
        log.exception("EngineCore was not launched")
        worker.send({"failed": f"{type(error).__name__}: {error}"})
        return 1
    return _keep(worker, manager)


def _keep(worker: Connection, manager: Any) -> int:
    """Until the worker says so, or EngineCore ends by itself."""
    ready = wait([worker, *manager.sentinels()])
    timeout_s, code = 0.0, 1
    if worker in ready:
        try:
            timeout_s, code = float(worker.recv()["end"]), 0
        except EOFError:
            pass
    manager.shutdown(timeout_s)
    return code
