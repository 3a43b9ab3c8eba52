"""Checks of the operating system: memory, limits, disks, clock, network. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.doctor.findings import Check, Result, Results, faults_or_ok, not_checked, ok, problem, warning
from dynamo_local.core.types import Missing

MIB, GIB = 1024**2, 1024**3
SHM_ENOUGH_BYTES = GIB
"""NCCL and vLLM take some hundred MiB for each worker of several GPUs. Docker gives a container 64 MiB."""
SHM_LEAST_BYTES = 16 * MIB
ORPHANS_BYTES = 256 * MIB
MEMORY_ENOUGH_BYTES, MEMORY_LEAST_BYTES = 4 * GIB, GIB
"""A graph of simulated engines takes about a GiB: arbiter, etcd, NATS and some workers of 100 to 200 MiB each."""
DISK_ENOUGH_BYTES, DISK_LEAST_BYTES = 2 * GIB, 64 * MIB
"""A process may write 256 MiB of logs (docs/operations.md)."""
INODES_LEAST = 1000
PROCESSES_ENOUGH, PROCESSES_LEAST = 1024, 128
"""A worker of vLLM starts some hundred threads."""
PROCESSORS_ENOUGH = 2.0
PORTS_ENOUGH = 1000
CLOCK_SLACK_S = 60.0
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "glusterfs"})
"""Where a lock may not be a lock for other hosts, and a unix socket cannot be made on some."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """/dev/shm, bytes. `orphans`: (files, bytes) of this user's segments that no process maps any more."""

    total_bytes: int
    free_bytes: int
    writable: bool = True
    orphans: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process; None is unlimited. `processes_left` is the least of ulimit and control group.

    `needed`: descriptors that an arbiter needs at least, and those that it raises its limit to.
    """

    descriptors_hard: int | None
    memlock_bytes: int | None
    processes_left: int | None = None
    needed: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory, bytes. `group_left_bytes`: what the control groups' limits leave; None without a limit."""

    available_bytes: int
    group_left_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """One of our folders, or its nearest parent that exists. `fault` says why it cannot be used."""

    path: str
    fault: str | None = None
    free_bytes: int = DISK_ENOUGH_BYTES
    free_inodes: int | None = None
    """None where the file system does not count them."""
    kind: str = ""
    """The file system's name in /proc/mounts."""


@dataclass(frozen=True, slots=True)
class Clock:
    """`future`: file and seconds by which it was written later than now. `steps`: run and seconds of a step since its
    start (the wall clock against the clock since boot)."""

    future: Sequence[tuple[str, float]] = ()
    steps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """`loopback` says why 127.0.0.1 cannot be listened on. `localhost`: its addresses. `proxies`: variables that are
    set, with masked values. `exempt`: whether no_proxy names 127.0.0.1. `ephemeral`: the first and last port."""

    loopback: str | None = None
    localhost: Sequence[str] = ("127.0.0.1",)
    proxies: Mapping[str, str] = field(default_factory=dict)
    exempt: bool = True
    ephemeral: tuple[int, int] = (32768, 60999)


@dataclass(frozen=True, slots=True)
class Rdma:
    """RDMA devices of /sys/class/infiniband, and those device files of them that this user may not open."""

    devices: Sequence[str] = ()
    refused: Sequence[str] = ()


def size_text(size_bytes: int) -> str:
    """`64 MiB` or `1.5 GiB`."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes // MIB} MiB"


Folders = Mapping[str, Folder | Missing]


def shm(shared_memory: SharedMemory) -> Results:
    """/dev/shm is there and large enough. Engines on several GPUs exchange data in it."""
    size = f"/dev/shm: {size_text(shared_memory.total_bytes)}, {size_text(shared_memory.free_bytes)} free"
    repair = "mount it larger: `--shm-size=8g` or `--ipc=host` of the container, or `mount -o remount,size=8g /dev/shm`"
    if not shared_memory.writable:
        yield problem("/dev/shm may not be written", "mount a tmpfs on /dev/shm with mode 1777")
    elif shared_memory.free_bytes < SHM_LEAST_BYTES:
        yield problem(size, f"remove what fills it (`ls -l /dev/shm`), or {repair}")
    elif shared_memory.free_bytes < SHM_ENOUGH_BYTES:
        yield warning(f"{size}; workers of several GPUs need about {size_text(SHM_ENOUGH_BYTES)}", repair)
    else:
        yield ok(size)


def shm_orphans(shared_memory: SharedMemory) -> Results:
    """No dead process has left large segments in /dev/shm. They take main memory until the next boot."""
    files, size = shared_memory.orphans
    evidence = f"{files} segments of yours in /dev/shm are mapped by no process: {size_text(size)}"
    if size >= ORPHANS_BYTES:
        yield warning(evidence, "if none of your programs runs: rm /dev/shm/psm_* /dev/shm/sem.mp-*")
    else:
        yield ok(evidence)


def descriptors(limits: Limits) -> Results:
    """A process may open enough files. The arbiter needs two descriptors for each worker, a Frontend one a client."""
    hard, (least, enough) = limits.descriptors_hard, limits.needed
    evidence = f"RLIMIT_NOFILE: at most {'unlimited' if hard is None else hard}"
    repair = f"raise it to {enough} or more: `ulimit -n`, LimitNOFILE= of the unit, --ulimit nofile"
    if hard is not None and hard < least:
        yield problem(evidence, repair)
    elif hard is not None and hard < enough:
        yield warning(evidence, repair)
    else:
        yield ok(evidence)


def locked_memory(limits: Limits, rdma: Rdma) -> Results:
    """RDMA may lock memory. UCX registers KV blocks with the network card, which locks them."""
    size = limits.memlock_bytes
    evidence = f"RLIMIT_MEMLOCK: {'unlimited' if size is None else size_text(size)}; RDMA devices: {len(rdma.devices)}"
    if rdma.devices and size is not None:
        yield warning(evidence, "ulimit -l unlimited; LimitMEMLOCK=infinity of the unit; --ulimit memlock=-1")
    else:
        yield ok(evidence)


def rdma_access(rdma: Rdma) -> Results:
    """This user may open the RDMA devices of the host. Else UCX falls back to TCP without a word."""
    if rdma.refused:
        yield warning(
            f"no permission to open {', '.join(rdma.refused)}",
            "join the group that owns them, or start the container with --device=/dev/infiniband",
        )
    else:
        yield ok(f"RDMA devices: {', '.join(rdma.devices) or 'none'}")


def processes(limits: Limits) -> Results:
    """Enough processes and threads may be started."""
    left = limits.processes_left
    evidence = f"{'no limit of' if left is None else left} processes and threads may be started (ulimit -u, pids.max)"
    repair = "raise `ulimit -u`, TasksMax= of the unit, --pids-limit of the container"
    if left is not None and left < PROCESSES_LEAST:
        yield problem(evidence, repair)
    elif left is not None and left < PROCESSES_ENOUGH:
        yield warning(evidence, repair)
    else:
        yield ok(evidence)


def memory(memory: Memory) -> Results:
    """Main memory is left for the graph: on the host, and within the control group."""
    left = [memory.available_bytes, *([] if memory.group_left_bytes is None else [memory.group_left_bytes])]
    group = "no limit" if memory.group_left_bytes is None else f"{size_text(memory.group_left_bytes)} left"
    evidence = f"/proc/meminfo: {size_text(memory.available_bytes)} available; control group: {group}"
    if min(left) < MEMORY_LEAST_BYTES:
        yield problem(evidence, "end what takes it, or raise memory.max (MemoryMax=, --memory)")
    elif min(left) < MEMORY_ENOUGH_BYTES:
        yield warning(
            evidence, "enough for simulated engines only: free some, or raise memory.max (MemoryMax=, --memory)"
        )
    else:
        yield ok(evidence)


def processors(allowed_cpus: frozenset[int], cpu_quota: float | None) -> Results:
    """At least two processors may be used. Each worker has one or two busy threads."""
    usable = float(len(allowed_cpus)) if cpu_quota is None else min(cpu_quota, len(allowed_cpus))
    evidence = f"{len(allowed_cpus)} processors; quota of the control group: {cpu_quota or 'none'}"
    if usable < PROCESSORS_ENOUGH:
        yield warning(evidence, "give it more: --cpus of the container, CPUQuota= of the unit, the cpuset")
    else:
        yield ok(evidence)


def folder(folders: Folders) -> Results:
    """This user can make and write the folders of statefiles, logs, sockets and GPU locks."""
    for name, found, faults in _each(folders):
        if found.fault is not None:
            faults = [
                problem(
                    found.fault,
                    "give it to yourself, or set DYN_LOCAL_STATE_DIR, DYN_LOCAL_LOG_DIR, XDG_RUNTIME_DIR",
                    name,
                )
            ]
        yield from faults or [ok(found.path, name)]


def disk(folders: Folders) -> Results:
    """There is space, and there are inodes, for statefiles and logs."""
    for name, found, faults in _each(folders):
        inodes = "" if found.free_inodes is None else f", {found.free_inodes} inodes"
        evidence = f"{found.path}: {size_text(found.free_bytes)} free{inodes}"
        repair = "free some space, or choose another disk: DYN_LOCAL_STATE_DIR, DYN_LOCAL_LOG_DIR, XDG_RUNTIME_DIR"
        if found.fault is not None:
            continue  # another place will be chosen
        few = found.free_inodes is not None and found.free_inodes < INODES_LEAST
        if found.free_bytes < DISK_LEAST_BYTES or few:
            faults = [problem(evidence, repair, name)]
        elif name == "logs" and found.free_bytes < DISK_ENOUGH_BYTES:
            faults = [warning(evidence, repair, name)]
        yield from faults or [ok(evidence, name)]


def network_folder(folders: Folders) -> Results:
    """The folders of statefiles, sockets and locks are on this host. On a network file system locks may not hold."""
    for name, found, faults in _each(folders):
        if name != "logs" and found.kind in NETWORK_FILE_SYSTEMS:
            faults = [
                warning(
                    f"{found.path} is on {found.kind}",
                    "choose a local disk: DYN_LOCAL_STATE_DIR, XDG_RUNTIME_DIR",
                    name,
                )
            ]
        yield from faults or [ok(f"{found.path} is on {found.kind or 'an unknown file system'}", name)]


def _each(folders: Folders) -> Iterator[tuple[str, Folder, list[Result]]]:
    """Name, folder, and no fault yet; for a folder that could not be read, that it was not checked."""
    for name, found in folders.items():
        if isinstance(found, Missing):
            yield name, Folder(""), [not_checked(found.reason, name)]
        else:
            yield name, found, []


def clock(clock: Clock) -> Results:
    """The wall clock was not stepped. Certificates, logs and `--since` go by the wall clock."""
    faults = [
        warning(
            f"the clock was stepped by {step_s:+.0f} s since the run {run} began",
            "let chrony or systemd-timesyncd slew the clock; deadlines and leases are not affected",
        )
        for run, step_s in clock.steps.items()
        if abs(step_s) > CLOCK_SLACK_S
    ]
    late = [(path, ahead_s) for path, ahead_s in clock.future if ahead_s > CLOCK_SLACK_S]
    if late:
        path, ahead_s = max(late, key=lambda each: each[1])
        faults.append(
            warning(
                f"{path} was written {ahead_s:.0f} s later than now",
                "set the clock (`timedatectl`), and keep it in step",
            )
        )
    yield from faults_or_ok(faults, f"no file of ours is of the future; no step during {len(clock.steps)} runs")


def loopback(network: Network) -> Results:
    """127.0.0.1 can be listened on, and `localhost` means it. All parts of a graph talk over it."""
    if network.loopback is not None:
        yield problem(f"127.0.0.1 cannot be listened on: {network.loopback}", "sudo ip link set lo up")
    elif "127.0.0.1" not in network.localhost:
        yield warning(
            f"localhost is {', '.join(network.localhost) or 'no address'}, not 127.0.0.1",
            "have /etc/hosts say `127.0.0.1 localhost`; or use http://127.0.0.1:8000",
        )
    else:
        yield ok("127.0.0.1 can be listened on; localhost is 127.0.0.1")


def proxy(network: Network) -> Results:
    """Clients of this host reach the Frontend without a proxy."""
    if network.proxies and not network.exempt:
        named = ", ".join(f"{name}={value}" for name, value in network.proxies.items())
        yield warning(f"{named}, and no_proxy does not name 127.0.0.1", "export no_proxy=127.0.0.1,localhost")
    else:
        yield ok(f"proxy variables: {', '.join(network.proxies) or 'none'}")


def port_range(network: Network) -> Results:
    """The kernel has enough ports for outgoing connections and for port 0."""
    first, last = network.ephemeral
    evidence = f"net.ipv4.ip_local_port_range: {first} to {last}"
    if last - first + 1 < PORTS_ENOUGH:
        yield warning(evidence, "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    else:
        yield ok(evidence)


CHECKS: tuple[Check, ...] = (
    memory,
    processors,
    shm,
    shm_orphans,
    descriptors,
    processes,
    locked_memory,
    rdma_access,
    folder,
    disk,
    network_folder,
    clock,
    loopback,
    proxy,
    port_range,
)
