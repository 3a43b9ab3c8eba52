"""Checks of drivers and GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.doctor.findings import Check, Result, Results, faults_or_ok, not_checked, ok, problem, warning
from dynamo_local.core.gpus import LINK_NVLINK, LINK_UNKNOWN, GpuDevice, gib, link_score, occupant
from dynamo_local.core.types import Missing

THROTTLE_REASONS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's bits of `clocksEventReasons` that name a fault. A power cap under load is usual, and so is an idle clock."""
COMPUTE_DEFAULT, COMPUTE_PROHIBITED = 0, 2
FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS = 1, 2

NO_GPU = "this host has no NVIDIA GPU: use `--gpus sim:8`, or vLLM's CPU build"


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver, by NVML. `error`: why no GPU can be used; None if NVML answers. `cuda` is (major, minor)."""

    error: str | None = None
    version: str | Missing = Missing("not read")  # noqa: RUF009 - frozen
    cuda: tuple[int, int] | Missing = Missing("not read")  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class DeviceFiles:
    """The kernel's view. `pci`: addresses of NVIDIA GPUs; in a container, of the whole host.

    `nodes` maps /dev/nvidia*: whether this user may read and write it.
    """

    pci: tuple[str, ...] = ()
    nodes: Mapping[str, bool] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        """Whether there is a GPU for this process. A container shows the PCI devices of its host, but not the nodes."""
        return bool(self.pci or self.gpu_nodes)

    @property
    def gpu_nodes(self) -> list[str]:
        """The nodes of single GPUs, such as /dev/nvidia0."""
        return [node for node in self.nodes if node.removeprefix("/dev/nvidia").isdecimal()]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device with its health. `pcie` is (lanes in use, lanes that the device has). `throttled` has NVML's bits.

    `remap` is (a row remap waits for a reset, a remap has failed). `nvlinks` counts the active ones.
    """

    device: GpuDevice
    mig: bool | Missing = False
    uncorrected_errors: int | Missing = 0
    remap: tuple[bool, bool] | Missing = (False, False)
    throttled: int | Missing = 0
    compute_mode: int | Missing = COMPUTE_DEFAULT
    pcie: tuple[int, int] | Missing = (16, 16)
    nvlinks: int = 0
    fabric: int | Missing = 0

    @property
    def name(self) -> str:
        return f"GPU {self.device.index}"


@dataclass(frozen=True, slots=True)
class Visible:
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves. `setting`: its value, None if it is not set. `error`: its fault."""

    setting: str | None = None
    indices: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GpuUsers:
    """Whose processes are on the GPUs. `ours`: pid to watcher, `users`: pid to user name, `locked`: UUID to holder."""

    ours: Mapping[int, str] = field(default_factory=dict)
    users: Mapping[int, str] = field(default_factory=dict)
    locked: Mapping[str, str] = field(default_factory=dict)


Gpus = Sequence[Gpu]


def gpu_driver(driver: Driver, device_files: DeviceFiles) -> Results:
    """NVML answers, so that GPUs can be found and handed out. Without the driver no GPU worker starts."""
    if driver.error is None:
        version = driver.version if isinstance(driver.version, str) else "unknown"
        cuda = "unknown" if isinstance(driver.cuda, Missing) else "{}.{}".format(*driver.cuda)
        yield ok(f"NVML: driver {version}, CUDA up to {cuda}")
    elif not device_files.any:
        yield not_checked(NO_GPU)
    elif not device_files.gpu_nodes:
        yield problem(
            f"/sys/bus/pci shows {len(device_files.pci)} NVIDIA GPUs, /dev has none; NVML: {driver.error}",
            "install the NVIDIA driver, or start the container with `--gpus all`",
        )
    elif "mismatch" in driver.error.lower():
        yield problem(
            f"NVML: {driver.error}", "the driver was upgraded while its old module is loaded: reboot the host"
        )
    else:
        yield problem(f"NVML: {driver.error}", "look at `nvidia-smi` and `dmesg | grep -i xid`; then reset or reboot")


def gpu_nodes(device_files: DeviceFiles) -> Results:
    """This user may open the device files of the driver. CUDA also needs /dev/nvidia-uvm, which NVML does not."""
    if not device_files.gpu_nodes:
        yield not_checked(NO_GPU if not device_files.any else "there is no /dev/nvidia0")
        return
    needed = ("/dev/nvidiactl", "/dev/nvidia-uvm", *device_files.gpu_nodes)
    missing = [node for node in needed if node not in device_files.nodes]
    refused = [node for node in needed if device_files.nodes.get(node) is False]
    faults = []
    if missing:
        faults.append(problem(f"missing: {', '.join(missing)}", "sudo nvidia-modprobe -u -c=0"))
    if refused:
        faults.append(
            problem(
                f"no permission to open {', '.join(refused)}", "join the group that owns them (`ls -l /dev/nvidia*`)"
            )
        )
    yield from faults_or_ok(faults, f"readable and writable: {', '.join(needed)}")


def gpu_lost(gpus: Gpus, device_files: DeviceFiles) -> Results:
    """NVML lists every GPU that has a device file. A GPU that fell off the bus keeps its file."""
    nodes = device_files.gpu_nodes
    if len(nodes) > len(gpus):
        yield warning(
            f"there are {len(nodes)} device files ({', '.join(nodes)}), and NVML lists {len(gpus)} GPUs",
            "look for Xid 79 in `dmesg`; a GPU that fell off the bus needs a reboot",
        )
    else:
        yield ok(f"NVML lists {len(gpus)} GPUs, there are {len(nodes)} device files")


def gpu_visible(visible: Visible) -> Results:
    """`CUDA_VISIBLE_DEVICES` of this shell leaves GPUs to serve on. Serving takes only those."""
    if visible.error is not None:
        yield problem(visible.error, "unset CUDA_VISIBLE_DEVICES, or name GPUs of this host")
    elif visible.setting is not None and not visible.indices:
        yield problem(
            f"CUDA_VISIBLE_DEVICES={visible.setting!r} hides every GPU",
            "unset CUDA_VISIBLE_DEVICES, or use --gpus sim:8",
        )
    else:
        left = ", ".join(map(str, visible.indices))
        yield ok(f"CUDA_VISIBLE_DEVICES is {visible.setting or 'not set'}: GPUs {left}")


def gpu_mig(gpus: Gpus) -> Results:
    """No GPU is cut into MIG slices. Workers take whole GPUs."""
    faults = (
        problem(
            "MIG is on: CUDA shows only its slices",
            f"sudo nvidia-smi -i {gpu.device.index} -mig 0, or leave it out with --gpus",
            gpu.name,
        )
        for gpu in gpus
        if gpu.mig is True
    )
    yield from faults_or_ok(faults, _read(gpus, "MIG is off", "mig"))


def gpu_ecc(gpus: Gpus) -> Results:
    """The memory of the GPUs has no uncorrectable errors since the driver's start, and no row waits to be remapped."""
    yield from faults_or_ok(
        (fault for gpu in gpus for fault in _memory_faults(gpu)),
        _read(gpus, "no uncorrectable ECC error, no pending row remap", "uncorrected_errors"),
    )


def _memory_faults(gpu: Gpu) -> Iterator[Result]:
    reset = f"end its processes, then `sudo nvidia-smi -r -i {gpu.device.index}`"
    if not isinstance(gpu.remap, Missing) and gpu.remap[1]:
        yield problem("a memory row could not be remapped", "have the GPU replaced; leave it out with --gpus", gpu.name)
    elif not isinstance(gpu.remap, Missing) and gpu.remap[0]:
        yield warning("a memory row waits to be remapped", reset, gpu.name)
    if not isinstance(gpu.uncorrected_errors, Missing) and gpu.uncorrected_errors:
        yield warning(f"{gpu.uncorrected_errors} uncorrectable ECC errors since the driver's start", reset, gpu.name)


def gpu_throttled(gpus: Gpus) -> Results:
    """No GPU is slowed down by heat or by its power supply at this moment."""
    faults = []
    for gpu in gpus:
        reasons = 0 if isinstance(gpu.throttled, Missing) else gpu.throttled
        named = [name for bit, name in THROTTLE_REASONS.items() if reasons & bit]
        if named:
            faults.append(
                warning(f"clocks are reduced: {', '.join(named)}", "look at `nvidia-smi -q -d PERFORMANCE`", gpu.name)
            )
    yield from faults_or_ok(faults, _read(gpus, "clocks are not reduced", "throttled"))


def gpu_compute_mode(gpus: Gpus) -> Results:
    """Processes may use the GPUs. The exclusive mode lets one process at a time: no standby, no prewarmed processes."""
    faults = []
    for gpu in gpus:
        if isinstance(gpu.compute_mode, Missing) or gpu.compute_mode == COMPUTE_DEFAULT:
            continue
        repair = f"sudo nvidia-smi -i {gpu.device.index} -c DEFAULT"
        if gpu.compute_mode == COMPUTE_PROHIBITED:
            faults.append(problem("its compute mode is prohibited", repair, gpu.name))
        else:
            faults.append(warning("its compute mode is exclusive: one process at a time", repair, gpu.name))
    yield from faults_or_ok(faults, _read(gpus, "the compute mode is default", "compute_mode"))


def gpu_pcie(gpus: Gpus) -> Results:
    """Each GPU uses all of its PCIe lanes. Loading weights and offloading KV take longer on fewer lanes."""
    faults = (
        warning(
            f"{gpu.pcie[0]} of {gpu.pcie[1]} PCIe lanes are in use",
            "a slot with fewer lanes, or a bad riser: look at `nvidia-smi -q -d PCIE`",
            gpu.name,
        )
        for gpu in gpus
        if not isinstance(gpu.pcie, Missing) and gpu.pcie[0] < gpu.pcie[1]
    )
    yield from faults_or_ok(faults, _read(gpus, "all PCIe lanes are in use", "pcie"))


def gpu_nvlink(gpus: Gpus) -> Results:
    """Each GPU has as many NVLinks as its like. A missing link makes tensor parallelism and KV hand-offs slower."""
    most = {gpu.device.name: max(each.nvlinks for each in gpus if each.device.name == gpu.device.name) for gpu in gpus}
    faults = (
        warning(
            f"{gpu.nvlinks} NVLinks are active, {most[gpu.device.name]} of another {gpu.device.name}",
            f"look at `nvidia-smi nvlink -s -i {gpu.device.index}` and at the fabric manager",
            gpu.name,
        )
        for gpu in gpus
        if gpu.nvlinks < most[gpu.device.name]
    )
    links = ", ".join(f"{gpu.name}: {gpu.nvlinks}" for gpu in gpus)
    yield from faults_or_ok(faults, f"active NVLinks: {links}")


def gpu_fabric(gpus: Gpus) -> Results:
    """On hosts with NVSwitch, each GPU has joined the fabric. Until then CUDA does not start (error 802)."""
    faults = (
        problem(
            "it has not joined the NVSwitch fabric",
            "sudo systemctl restart nvidia-fabricmanager, whose version must be the driver's",
            gpu.name,
        )
        for gpu in gpus
        if gpu.fabric in (FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS)
    )
    yield from faults_or_ok(faults, "no GPU waits for an NVSwitch fabric")


def gpu_topology(gpus: Gpus) -> Results:
    """NVML says how the GPUs are connected. Placement puts the GPUs of one worker where the links are best."""
    devices = [gpu.device for gpu in gpus]
    pairs = [(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    unknown = [f"{a.index}-{b.index}" for a, b in pairs if link_score(a, b) == LINK_UNKNOWN]
    nvlinked = sum(link_score(a, b) > LINK_NVLINK for a, b in pairs)
    if unknown:
        yield warning(
            f"the links of GPUs {', '.join(unknown)} are not known: their workers are placed by index",
            "look at `nvidia-smi topo -m`; a virtual machine may hide the topology",
        )
    else:
        nodes = sorted({device.numa_node for device in devices if isinstance(device.numa_node, int)})
        where = ", ".join(map(str, nodes)) or "unknown"
        yield ok(f"{nvlinked} of {len(pairs)} pairs of GPUs have NVLink; NUMA nodes: {where}")


def gpu_numa(gpus: Gpus, numa_cpus: Mapping[int, frozenset[int]], allowed_cpus: frozenset[int]) -> Results:
    """This process may run on the processors beside each GPU. A cpuset may leave only those of the other socket."""
    faults = (
        warning(
            f"it is near NUMA node {node}, and this process may use none of that node's processors",
            "widen the cpuset (`taskset`, `--cpuset-cpus`, AllowedCPUs=), or choose GPUs with --gpus",
            gpu.name,
        )
        for gpu in gpus
        if isinstance(node := gpu.device.numa_node, int)
        and node in numa_cpus
        and allowed_cpus.isdisjoint(numa_cpus[node])
    )
    yield from faults_or_ok(faults, f"{len(allowed_cpus)} processors may be used, beside each GPU")


def gpu_stranger(gpus: Gpus, gpu_users: GpuUsers) -> Results:
    """No foreign process holds a GPU. A GPU that somebody else uses is not handed out."""
    faults = []
    for gpu in gpus:
        device, who = gpu.device, occupant(gpu.device)
        if who is None or device.uuid in gpu_users.locked:
            continue
        processes = () if isinstance(device.processes, Missing) else device.processes
        strangers = [process for process in processes if process.pid not in gpu_users.ours]
        if processes and not strangers:
            continue
        named = ", ".join(
            f"pid {each.pid} is {user}'s" for each in strangers if (user := gpu_users.users.get(each.pid))
        )
        faults.append((gpu, f"held by {who}" + (f" ({named})" if named else "")))
    all_taken = len(faults) == len(gpus) > 0
    repair = "end that process, or leave the GPU out with --gpus"
    results = (
        problem(f"{evidence}; no GPU is free", repair, gpu.name) if all_taken else warning(evidence, repair, gpu.name)
        for gpu, evidence in faults
    )
    yield from faults_or_ok(results, _holders(gpus, gpu_users))


def _holders(gpus: Gpus, gpu_users: GpuUsers) -> str:
    held = [f"{gpu.name}: {gpu_users.locked[gpu.device.uuid]}" for gpu in gpus if gpu.device.uuid in gpu_users.locked]
    free = sum(gpu.device.uuid not in gpu_users.locked for gpu in gpus)
    sizes = {gib(gpu.device.memory_total_bytes) for gpu in gpus if isinstance(gpu.device.memory_total_bytes, int)}
    return "; ".join([f"no foreign process on {len(gpus)} GPUs of {', '.join(sorted(sizes))}, {free} are free", *held])


def _read(gpus: Gpus, evidence: str, attribute: str) -> str:
    """The evidence, with the GPUs that NVML does not say it of."""
    unread = [gpu.name for gpu in gpus if isinstance(getattr(gpu, attribute), Missing)]
    return evidence + (f" (NVML does not say it of {', '.join(unread)})" if unread else "")


CHECKS: tuple[Check, ...] = (
    gpu_driver,
    gpu_nodes,
    gpu_lost,
    gpu_visible,
    gpu_stranger,
    gpu_mig,
    gpu_ecc,
    gpu_throttled,
    gpu_compute_mode,
    gpu_pcie,
    gpu_nvlink,
    gpu_fabric,
    gpu_topology,
    gpu_numa,
)
