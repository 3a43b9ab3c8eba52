"""Resources that each engine on a host needs for itself: ports, a folder for sockets, a cache.

Each is leased for the life of the process (`host_leases`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dynamo_local.errors import EngineError
from dynamo_local.system.host_leases import is_free, lease

log = logging.getLogger(__name__)

PORTS = range(20_000, 28_000)
"""Below 32768, where the kernel takes ports for outgoing connections: a port that is free now stays free."""
PORTS_PER_ENGINE = 16
"""NIXL listens on the first plus the rank."""
SHARED = ("modelinfos/*.json", "torch_compile_cache/torch_aot_compile/*/rank_*/model")
"""In a cache of vLLM's: what it knows of models' classes, and the graphs that it has compiled."""
IPC_PATH_MAX = 107
_IPC_NAME_BYTES = 40
"""Room for the names of vLLM's sockets (UUIDs), which are in the folder that we give."""


@dataclass(slots=True)
class EngineResources:
    """The resources of one engine. `environment` is for vLLM; `close` gives everything back."""

    host: str
    port: int
    environment: dict[str, str]
    folder: Path
    _leases: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Remove the folder of sockets and let go of the leases. The cache stays: it makes the next start faster."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for held in self._leases:
            held.close()
        self._leases.clear()


def take(name: str, environ: Mapping[str, str]) -> EngineResources:
    """Ports and folders for the engine of the worker `name`. Raises `EngineError` where no port is left."""
    leases: list[socket.socket] = []
    try:
        port = _port_block(name, leases)
        cache = _cache_folder(name, environ, leases)
        folder = _socket_folder(environ)
    except BaseException:
        for held in leases:
            held.close()
        raise
    host = environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or "127.0.0.1"
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_CACHE_ROOT": str(cache),
    }
    return EngineResources(host, port, environment, folder, leases)


def _port_block(name: str, leases: list[socket.socket]) -> int:
    """The first of `PORTS_PER_ENGINE` free ports. Each worker starts its search at another place."""
    blocks = len(PORTS) // PORTS_PER_ENGINE
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    for n in range(blocks):
        port = PORTS.start + (first + n) % blocks * PORTS_PER_ENGINE
        held = lease(f"ports/{port}")
        if held is None:
            continue
        if all(is_free(port + offset) for offset in range(PORTS_PER_ENGINE)):
            leases.append(held)
            return port
        held.close()
    raise EngineError(f"no {PORTS_PER_ENGINE} free ports in a row between {PORTS.start} and {PORTS.stop} on this host")


def cache_root(environ: Mapping[str, str]) -> Path:
    """Our folder in vLLM's cache. Not created here."""
    configured = environ.get("VLLM_CACHE_ROOT")
    vllm = Path(configured) if configured else Path(environ.get("HOME") or Path.home()) / ".cache" / "vllm"
    return vllm / "dynamo-local"


def _cache_folder(name: str, environ: Mapping[str, str], leases: list[socket.socket]) -> Path:
    """The worker's own cache folder. Later runs find their compiled graphs. A second worker of a name has `NAME.1`."""
    root = cache_root(environ)
    n = 0
    while True:
        folder = root / (name if n == 0 else f"{name}.{n}")
        held = lease(f"cache/{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}")
        if held is not None:
            leases.append(held)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _share(root, folder)
            return folder
        n += 1


def _share(root: Path, own: Path) -> None:
    """Share vLLM's caches of other workers. Without them, vLLM imports itself again in another process to inspect the
    model's class. That was half of the start of a worker with a new name. Compiling takes a minute.

    A file's name contains a hash of its sources, and vLLM compares the sources when it reads the file. vLLM writes each
    file under another name first. So a file is complete, and one that does not fit is made again.
    """
    try:
        for pattern in SHARED:
            for file in sorted(root.glob(f"*/{pattern}"), key=os.path.getmtime, reverse=True):
                mine = own / file.relative_to(root / file.relative_to(root).parts[0])
                if not mine.exists():
                    mine.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    os.link(file, mine)
    except OSError as error:  # another worker's folder was just removed: vLLM looks by itself
        log.info("what vLLM has in the caches of other workers was not shared: %s", error)


def _socket_folder(environ: Mapping[str, str]) -> Path:
    """In the run's folder, which is removed with the run; elsewhere if the sockets' paths would be too long there."""
    given = environ.get("DYN_WORKER_FOLDER")
    if given and len(os.fsencode(given)) + _IPC_NAME_BYTES <= IPC_PATH_MAX:
        folder = Path(given)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="dyn-vllm-"))


# Processors. vLLM's CPU build with NIXL assumes one engine per host, with spare cores.
#
# * NIXL's progress thread polls without a pause, so even an idle engine keeps a core busy. The descriptors that it
#   polls wake it, so a pause adds no latency. With a pause of 1 ms the thread takes 1.5 % of a core.
# * NixlConnector pins the computing thread to the last core of each NUMA node. Then all engines of a host share one
#   core. Hand-offs took up to 15 s on a busy machine with two cores.

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
