"""Reads the operating system: memory, limits, disks, clock, network. `root` is `/`, or a folder in its place."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from dynamo_local.core.doctor.host import Clock, Folder, Limits, Memory, Network, Rdma, SharedMemory
from dynamo_local.core.secrets import mask_text
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError
from dynamo_local.state.raw import namespaces, read_raw, state_folder, statefile_path
from dynamo_local.system.gpu_locks import lock_folders
from dynamo_local.system.gpu_pool import host_free_bytes
from dynamo_local.system.host_errors import DESCRIPTORS_MIN, DESCRIPTORS_RAISED_TO
from dynamo_local.system.host_leases import LOOPBACK
from dynamo_local.system.paths import log_root, runtime_root

SEGMENTS = ("psm_*", "sem.mp-*")
"""Python's names of shared memory and semaphores."""
PROXIES = ("http_proxy", "all_proxy")
"""Those that a client of http://127.0.0.1 reads."""
NEVER_LIMITED = 1 << 60
"""Control groups of version 1 write a number near 2**63 where there is no limit."""


def shared_memory(root: Path) -> SharedMemory:
    """Raises `OSError` without a /dev/shm."""
    folder = root / "dev" / "shm"
    size = os.statvfs(folder)
    return SharedMemory(
        size.f_blocks * size.f_frsize,
        size.f_bavail * size.f_frsize,
        os.access(folder, os.W_OK | os.X_OK),
        _orphans(folder),
    )


def _orphans(folder: Path) -> tuple[int, int]:
    """Files and bytes of this user's segments that none of this user's processes maps."""
    ours: dict[str, int] = {}
    for pattern in SEGMENTS:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                info = path.stat()
                if info.st_uid == os.geteuid():
                    ours[str(path)] = info.st_blocks * 512
    for maps in Path("/proc").glob("[0-9]*/maps") if ours else ():
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            for mapped in [each for each in ours if each in text]:
                del ours[mapped]
    return len(ours), sum(ours.values())


def limits(root: Path) -> Limits:
    """The limits of this process, and of the control groups around it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    left = [most - now for most, now in _in_groups(root, "pids", "pids.max", "pids.current")]
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if own != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is exempt
        left.append(own - _threads())
    return Limits(
        None if hard == resource.RLIM_INFINITY else hard,
        None if locked == resource.RLIM_INFINITY else locked,
        min(left, default=None),
        needed=(DESCRIPTORS_MIN, DESCRIPTORS_RAISED_TO),
    )


def _threads() -> int:
    """How many threads this user has."""
    total = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] is not None and process.info["uids"].real == os.getuid():
            total += process.info["num_threads"] or 0
    return total


def memory(root: Path) -> Memory | Missing:
    """Main memory that is left."""
    available = host_free_bytes(root / "proc" / "meminfo")
    if isinstance(available, Missing):
        return available
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    left = [most - now for limit, usage in files for most, now in _in_groups(root, "memory", limit, usage)]
    return Memory(available, min(left, default=None))


def _in_groups(root: Path, controller: str, limit: str, usage: str) -> Iterator[tuple[int, int]]:
    """(limit, usage) of each control group around this process that sets that limit."""
    for folder in _groups(root, controller):
        try:
            most, now = ((folder / name).read_text().strip() for name in (limit, usage))
        except OSError:
            continue
        if most.isdecimal() and now.isdecimal() and int(most) < NEVER_LIMITED:
            yield int(most), int(now)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above, of either version."""
    base = root / "sys" / "fs" / "cgroup"
    for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = base
        elif controller in controllers.split(","):
            top = base / controllers
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top.parent and folder.is_relative_to(base):
            yield folder  # within a container it may not be there: then its parents are
            folder = folder.parent


def cpu_quota(root: Path) -> float | None:
    """Processors that the control groups allow. None: no quota."""
    quotas = []
    for folder in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def rdma(root: Path) -> Rdma:
    """RDMA devices, and their device files."""
    devices = tuple(sorted(path.name for path in root.glob("sys/class/infiniband/*")))
    files = sorted(root.glob("dev/infiniband/uverbs*"))
    refused = [f"/dev/infiniband/{path.name}" for path in files if not os.access(path, os.R_OK | os.W_OK)]
    return Rdma(devices, tuple(refused))


def network_devices(root: Path) -> frozenset[str]:
    """Names of network and RDMA devices."""
    return frozenset(path.name for kind in ("net", "infiniband") for path in root.glob(f"sys/class/{kind}/*"))


FOLDERS = ("state", "logs", "runtime", "GPU locks")


def folder(name: str, env: Mapping[str, str]) -> Folder:
    """One of `FOLDERS`: whether this user can use or make it, and what is left on its disk."""
    try:
        path = {
            "state": state_folder,
            "logs": log_root,
            "runtime": runtime_root,
            "GPU locks": lambda env: lock_folders(env)[0],
        }[name](env)
    except DynamoError as error:
        return Folder("", fault=str(error))
    there = path
    while not os.path.lexists(there):
        there = there.parent
    info, size = there.lstat(), os.statvfs(there)
    return Folder(
        str(path),
        _fault(path, there, info, private=name in ("runtime", "GPU locks")),
        size.f_bavail * size.f_frsize,
        size.f_favail if size.f_files else None,
        _kind(there),
    )


def _fault(path: Path, there: Path, info: os.stat_result, *, private: bool) -> str | None:
    if private and stat.S_ISLNK(info.st_mode):
        return f"{there} is a link, not a plain folder"
    if not there.is_dir():
        return f"{there} is not a folder"
    if there == path and info.st_uid != os.geteuid() and not stat.S_ISLNK(info.st_mode):
        return f"{path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})"
    if not os.access(there, os.W_OK | os.X_OK):
        what = path if there == path else f"{path} cannot be made: {there}"
        return f"{what} may not be written by you (uid {os.geteuid()}), or is on a read-only disk"
    return None


def _kind(path: Path) -> str:
    """The file system's name, of the longest mount point above the path. Reads only the table of mounts."""
    real = Path(os.path.realpath(path))
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


def clock(env: Mapping[str, str]) -> Clock:
    """Files of ours that are of the future, and steps of the clock during live runs."""
    now_s = time.time()
    folders = (state_folder(env), *log_root(env).glob("*"))
    files = [Path(__file__), *(file for folder in folders for file in folder.glob("*") if file.is_file())]
    future = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a log that is rotated just now
            if (ahead_s := file.stat().st_mtime - now_s) > 0:
                future.append((str(file), ahead_s))
    boot_s = now_s - time.clock_gettime(time.CLOCK_BOOTTIME)
    steps = {}
    for namespace in namespaces(env):
        with contextlib.suppress(DynamoError):
            step_s = _step_s(read_raw(statefile_path(namespace, env)), boot_s)
            if step_s is not None:
                steps[namespace] = step_s
    return Clock(future, steps)


def _step_s(raw: Mapping[str, object], boot_s: float) -> float | None:
    """The step that all of the run's workers have seen. A prewarmed process is older than its worker."""
    entries = raw.get("components")
    found = []
    for entry in entries.values() if isinstance(entries, dict) else ():
        started_s, since_boot_s = entry.get("started_at"), entry.get("pid_start_time")
        if isinstance(started_s, int | float) and isinstance(since_boot_s, int | float):
            found.append(boot_s + since_boot_s - started_s)
    return min(found, key=abs, default=None)


def network(root: Path, env: Mapping[str, str]) -> Network:
    """Loopback, the name `localhost`, proxies, and the kernel's ports for outgoing connections."""
    refused = None
    try:
        with socket.create_server((LOOPBACK, 0)):
            pass
    except OSError as error:
        refused = error.strerror or str(error)
    try:
        localhost = tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo("localhost", None)}))
    except OSError:
        localhost = ()
    proxies = {name: value for name, value in env.items() if name.lower() in PROXIES and value}
    exempt = {"no": env.get("no_proxy", env.get("NO_PROXY", ""))}
    first, last = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return Network(
        refused,
        localhost,
        {name: mask_text(value) for name, value in proxies.items()},
        bool(urllib.request.proxy_bypass_environment(LOOPBACK, exempt)),  # type: ignore[attr-defined]
        (int(first), int(last)),
    )


def allowed_cpus() -> frozenset[int]:
    """Processors on which this process may run."""
    return frozenset(os.sched_getaffinity(0))
