"""A spare: `python -m dynamo_local.worker.prewarmed ENGINE`. It imports an engine's modules, and waits for its order.

The order comes from the arbiter over a socket that it inherits, with the log file and the locks of the GPUs: command,
environment and folder of a worker. It becomes that worker, under the same pid. Until then it has one thread, no event
loop, no connection but that socket, and nothing on any GPU. When the arbiter is gone, it ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_local.core.prewarmed import MARKS, SOCKET_FD
from dynamo_local.errors import EXIT_FAILED, EXIT_OK, ConfigError, DynamoError
from dynamo_local.system import fd_messages, start_stages
from dynamo_local.system import processes as own_environment
from dynamo_local.system.prctl import die_as_asked
from dynamo_local.system.request_log import log_to_stderr

log = logging.getLogger("dynamo_local.spare")

COMMON = (
    "dynamo_local.worker.serve_dynamo",
    "dynamo_local.worker.process",
    "dynamo_local.components.vllm_worker",
    "dynamo_local.components.prefill_worker",
    "dynamo_local.components.frontend",
    "dynamo_local.components.processor",
    "dynamo_local.components.router",
    "dynamo_local.transport.etcd",
    "dynamo_local.sdk.loader",
    "uvloop",
)
"""Modules of every worker with an engine. A graph's module imports all of its components."""
ENGINE = {
    "sim": ("dynamo_local.engines.sim.engine", "numpy"),
    "vllm": ("dynamo_local.engines.vllm.launcher",),
}


def preload(engine: str) -> None:
    """Import the modules that a worker of this engine has when it is ready.

    Raises `ConfigError` for an engine that is not installed here.
    """
    for name in (*COMMON, *ENGINE[engine]):
        importlib.import_module(name)
    if engine == "vllm":
        from dynamo_local.engines.vllm.launcher import preload as preload_vllm

        preload_vllm()
    # Imported modules stay. If the collector never touches them again, a forked EngineCore shares their pages.
    gc.collect()
    gc.freeze()


def check_untouched() -> None:
    """Raises `ConfigError` if this process has begun to use a GPU: it could not be given another one any more."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError("importing the engine's modules has initialised CUDA; spares are of no use with it")
    opened = [target for target in _open_files() if target.startswith("/dev/nvidia-uvm")]
    if opened:
        raise ConfigError(f"importing the engine's modules has opened {opened[0]}; spares are of no use with it")


def _open_files() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(Path("/proc/self/fd") / entry))
        except OSError:
            continue  # the one of this very listing
    return found


def main(engine: str) -> int:
    """Returns only if no worker was made of it."""
    die_as_asked(os.environ)
    log_to_stderr(os.environ.get("DYN_LOG", "INFO").upper())
    with socket.socket(fileno=int(os.environ.pop(SOCKET_FD))) as arbiter:
        arbiter.set_inheritable(False)
        try:
            words = _wait(arbiter, engine)
        except fd_messages.Closed:
            log.info("the arbiter is gone")
            return EXIT_OK
        except (DynamoError, OSError, ValueError) as error:
            log.error("%s", error)
            with contextlib.suppress(OSError):
                fd_messages.send(arbiter, {"error": f"{error}"})
            return EXIT_FAILED
    from dynamo_local.worker.serve_dynamo import main as worker

    worker.main(list(words), prog_name="serve_dynamo")
    raise AssertionError("a worker's entry point ends its process")


def _wait(arbiter: socket.socket, engine: str) -> Sequence[str]:
    """The words of the worker that it is from now on. Raises `Closed`, `DynamoError`, `OSError`, ValueError."""
    began_s = time.monotonic()
    preload(engine)
    check_untouched()
    took_s, threads = time.monotonic() - began_s, len(os.listdir("/proc/self/task"))
    log.info("the modules of %s are imported after %.1f s; threads: %d", engine, took_s, threads)
    fd_messages.send(arbiter, {"warm": True, "took_s": took_s, "threads": threads})
    order, fds = fd_messages.receive(arbiter)
    start_stages.begin_anew()
    check_untouched()
    return _become(arbiter, order, fds, engine)


def _become(arbiter: socket.socket, order: Mapping[str, Any], fds: Sequence[int], engine: str) -> Sequence[str]:
    log_fd, *locks = fds
    os.chdir(order["cwd"])
    argv, env = list(order["argv"]), dict(order["env"])
    own_environment.become(env, marks=MARKS, secret=order["secret"], argv=argv)
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    for fd in locks:  # as a fresh worker has them
        os.set_inheritable(fd, True)
    sys.argv = argv[2:]
    fd_messages.send(arbiter, {"became": env["DYN_WATCHER_NAME"]})
    arbiter.close()
    if engine == "vllm":
        from dynamo_local.engines.vllm import launcher

        launcher.prepare()
    start_stages.passed("the spare's change")
    return argv[3:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
