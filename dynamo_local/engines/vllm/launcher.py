"""The processes of an engine: EngineCore is started by vLLM or by the launcher, watched by the worker, ended with it.

The launcher starts EngineCore by a fork of a prewarmed process, which has imported vLLM already.

vLLM itself uses `spawn`, which imports everything again (7 s), or `fork`, which is unsafe in a worker with threads, an
event loop and connections. So the fork comes first. A prewarmed process calls `prepare` just before it becomes a
worker. It then has one thread and has touched no device. The child, the *launcher*, waits for the worker's
configuration. Then the launcher calls vLLM's `launch_core_engines`, as `vllm serve` does with several API servers: one
process launches the engine, and the others are its clients (`client_addresses`). vLLM's method is `fork` there. If a
device is initialised already, vLLM falls back to `spawn`.

EngineCore is the launcher's child, and the launcher ends with the worker.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.engines.vllm.engine_resources import unpin
from dynamo_local.errors import ConfigError, EngineError
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


# Modules of vLLM that a prewarmed process imports: those of the worker, of EngineCore and of the platform workers.

MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "dynamo_local.engines.vllm.engine",
    "dynamo_local.engines.vllm.arguments",
    "dynamo_local.engines.vllm.watched_schedulers",
)
USEFUL = (
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.executor.uniproc_executor",
    "vllm.tokenizers.hf",
)
"""Modules of this version of vLLM. Another version may have moved one; then it is imported later, when needed."""


def preload() -> None:
    """Import `MODULES` and `USEFUL`. No device is touched. Raises `ConfigError` where vLLM is not installed."""
    if not is_installed():
        raise ConfigError("the engine is vllm, which is not installed here: no spare can be made of it")
    for name in MODULES:
        importlib.import_module(name)
    for name in USEFUL:
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.debug("not imported beforehand: %s", error)
    _platform()


def _platform() -> None:
    """The module of the workers of this host's platform, and the parser of arguments, which is slow the first time."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    importlib.import_module("vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker")


class CoreProcesses:
    """The processes of one engine. The worker's loop thread calls all methods except `launch` and `shutdown`."""

    def __init__(self) -> None:
        self._launcher: CoreLauncher | None = None
        self._watches: list[tuple[asyncio.AbstractEventLoop, int]] = []
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()

    async def build(self, build: Callable[[], Any]) -> Any:
        """Run `build` in a thread and return its result.

        Raises `EngineError` if the EngineCore that `launch` started ends first: `build` would wait for minutes.
        """
        building = asyncio.ensure_future(asyncio.to_thread(build))
        await asyncio.wait({building, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            raise EngineError(f"vLLM did not start: {self._failed.result()}; see above")
        await asyncio.to_thread(unpin, [pid for pid, _ in self._pids()])
        return building.result()

    def launch(self, config: Any, folder: Path) -> dict[str, str] | None:
        """Have EngineCore started by this process's launcher, if it has one: what `AsyncLLM` takes as
        `client_addresses`. None: vLLM is to start it. Called in the thread of `build`."""
        launched = take(config)
        if launched is None:
            return None
        from vllm.v1.executor import Executor

        addresses = launched.launch(config, Executor.get_class(config), folder)
        self._launcher = launched
        launched.watch(self._heard)
        return addresses

    def _heard(self, why: str) -> None:
        """In a thread of the launcher's."""
        self._loop.call_soon_threadsafe(self._fail, why)

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why)

    def watch(self, die: Callable[[str], None]) -> None:
        """Call `die` with the reason as soon as one of them ends."""
        for pid, name in self._pids():
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                die(f"{name} ended during the start")
                continue
            self._watches.append((self._loop, fd))
            self._loop.add_reader(fd, die, f"its process {name} (pid {pid}) ended")
        if not self._watches:
            die("none of its processes is there after the start")

    def _pids(self) -> list[tuple[int, str]]:
        children = [(child.pid, child.name) for child in multiprocessing.active_children() if child.pid is not None]
        if self._launcher is not None:
            children.append((self._launcher.pid, "EngineCore launcher"))
            children += [(pid, "EngineCore") for pid in self._launcher.core_pids]
        return children

    def watch_no_more(self) -> None:
        """The pidfd of a dead process stays readable."""
        for loop, fd in self._watches:
            loop.remove_reader(fd)
            os.close(fd)
        self._watches.clear()

    def shutdown(self, llm: Any, timeout_s: float) -> None:
        """End the engine. Blocks."""
        if self._launcher is not None:
            self._launcher.end(timeout_s)
        llm.shutdown(timeout_s)
