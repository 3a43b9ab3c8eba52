"""Which GPUs this host has, and which processes use them: from NVML, or simulated for machines without GPUs.

Nothing here needs a driver until `sample()` is called: a graph that asks for no GPU runs anywhere.
`sample()` blocks for some milliseconds, or for ever where the driver hangs: `GpuPool` calls it in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dynamo_local.core.gpus import (
    LINK_HOSTBRIDGE,
    LINK_INTERNAL,
    LINK_MULTIPLE,
    LINK_NODE,
    LINK_NVLINK,
    LINK_SINGLE,
    LINK_SYSTEM,
    LINK_UNKNOWN,
    GpuDevice,
    GpuProcess,
    simulated_uuid,
)
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError

# How the host's GPUs are wired, as link scores. Every call is optional: what is not supported is `Missing`.

_NUMA_NODES_MAX = 64


def optional(nvml: Any, call: str, *args: Any) -> Any:
    """The call's result, or `Missing` with NVML's reason (not supported, no permission, unknown to this driver)."""
    try:
        return getattr(nvml, call)(*args)
    except nvml.NVMLError as error:
        return Missing(f"{call}: {error}")


def numa_node(nvml: Any, handle: Any) -> int | Missing:
    """The NUMA node whose memory is nearest to the GPU.

    Not `nvmlDeviceGetNumaNodeId`: that is the node of the GPU's *own* memory, on coherent machines only.
    """
    mask = optional(nvml, "nvmlDeviceGetMemoryAffinity", handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)
    if isinstance(mask, Missing):
        return mask
    nodes = [node for node in range(_NUMA_NODES_MAX) if mask[0] >> node & 1]
    return nodes[0] if len(nodes) == 1 else Missing(f"near {len(nodes)} NUMA nodes")


def links_between(nvml: Any, handles: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """UUID to UUID to link score (see `core.gpus`); unknown pairs are left out."""
    nvlinks = {uuid: _nvlinks(nvml, handle) for uuid, handle in handles.items()}
    bus_ids = {uuid: _bus_id(nvml, handle) for uuid, handle in handles.items()}
    result: dict[str, dict[str, int]] = {uuid: {} for uuid in handles}
    uuids = list(handles)
    for i, a in enumerate(uuids):
        for b in uuids[i + 1 :]:
            wires = _wires(nvlinks[a], nvlinks[b], bus_ids[a], bus_ids[b])
            score = LINK_NVLINK + wires if wires else _pcie_score(nvml, handles[a], handles[b])
            if score != LINK_UNKNOWN:
                result[a][b] = result[b][a] = score
    return result


def _nvlinks(nvml: Any, handle: Any) -> list[str | None]:
    """The far end of each active NVLink: a PCI bus id, or None for a switch (or if NVML does not say)."""
    ends: list[str | None] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = optional(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if isinstance(state, Missing):
            break  # links are numbered without gaps; the first one that does not exist ends them
        if not state:
            continue
        kind = optional(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = optional(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        is_gpu = isinstance(kind, Missing) or kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU
        ends.append(_text(remote.busId) if is_gpu and not isinstance(remote, Missing) else None)
    return ends


def _wires(of_a: list[str | None], of_b: list[str | None], bus_a: str | None, bus_b: str | None) -> int:
    """NVLinks between two GPUs: direct ones, else those that both have into a switch (all switches are one fabric)."""
    direct = sum(end == bus_b for end in of_a if end is not None) + sum(end == bus_a for end in of_b if end is not None)
    if direct:
        return (direct + 1) // 2  # each wire was seen from both ends
    return min(of_a.count(None), of_b.count(None))


def _bus_id(nvml: Any, handle: Any) -> str | None:
    pci = optional(nvml, "nvmlDeviceGetPciInfo", handle)
    return None if isinstance(pci, Missing) else _text(pci.busId)


def _text(value: str | bytes) -> str:
    return (value.decode() if isinstance(value, bytes) else value).lower()


def _pcie_score(nvml: Any, a: Any, b: Any) -> int:
    levels = {
        nvml.NVML_TOPOLOGY_INTERNAL: LINK_INTERNAL,
        nvml.NVML_TOPOLOGY_SINGLE: LINK_SINGLE,
        nvml.NVML_TOPOLOGY_MULTIPLE: LINK_MULTIPLE,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: LINK_HOSTBRIDGE,
        nvml.NVML_TOPOLOGY_NODE: LINK_NODE,
        nvml.NVML_TOPOLOGY_SYSTEM: LINK_SYSTEM,
    }
    level = optional(nvml, "nvmlDeviceGetTopologyCommonAncestor", a, b)
    return LINK_UNKNOWN if isinstance(level, Missing) else levels.get(level, LINK_UNKNOWN)


SIM_MEMORY_BYTES = 80 * 1024**3
SIM_GPUS_PER_NODE = 4
SIM_GPUS_MAX = 1024
_SIM_NVLINKS = 18
"""NVLinks of one Hopper GPU (NV18)."""


class Inventory(Protocol):
    """The GPUs that may be used, as they are now."""

    @property
    def simulated(self) -> bool:
        """Simulated devices are private to a namespace; real ones are shared by all of the host."""
        ...

    def sample(self) -> tuple[GpuDevice, ...]:
        """Devices by index. Blocks. Raises `GpuError` without a driver, or for a device that does not exist."""
        ...

    def close(self) -> None:
        """Let go of the driver. A later `sample` opens it again."""
        ...


def pinning_disabled(env: Mapping[str, str]) -> bool:
    """`DYN_DISABLE_AUTO_GPU_ALLOCATION=1` (or `true`, `yes`, `on`): the user pins workers to GPUs, we do not."""
    return env.get("DYN_DISABLE_AUTO_GPU_ALLOCATION", "").strip().lower() in ("1", "true", "yes", "on")


def open_inventory(gpus: str | None, env: Mapping[str, str]) -> Inventory:
    """The inventory that `--gpus` (or `Host.gpus`) and the caller's environment describe.

    `gpus` is `sim:8`, `1,2,3` (indices as `nvidia-smi` shows them, UUIDs, or unique prefixes of UUIDs), or
    None / `all`. Real devices outside of the caller's `CUDA_VISIBLE_DEVICES` are ignored. Simulated ones ignore the
    variable. Raises `GpuError` for an unreadable option. `sample()` looks for the devices.
    """
    option = (gpus or "all").strip()
    if option.startswith("sim"):
        return SimInventory(_sim_count(option))
    wanted = None if option == "all" else _split(option)
    if wanted is not None:
        for token in wanted:
            if not token.isdecimal() and not token.startswith("GPU-"):
                raise GpuError(f"--gpus {option}: {token!r} is neither an index nor a UUID (try 0,1 or all or sim:8)")
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return NvmlInventory(wanted=wanted, visible=visible)


def _sim_count(option: str) -> int:
    number = option.removeprefix("sim:")
    if not number.isdecimal() or not 0 < int(number) <= SIM_GPUS_MAX:
        raise GpuError(f"--gpus {option}: write sim:<number>, for example sim:8 (at most {SIM_GPUS_MAX})")
    return int(number)


def _split(text: str) -> list[str]:
    return [token for token in (part.strip() for part in text.split(",")) if token]


def visible_to_cuda(devices: Sequence[GpuDevice], visible: str | None) -> tuple[GpuDevice, ...]:
    """The devices that `CUDA_VISIBLE_DEVICES` leaves, by index (we pin by UUID: its order means nothing here).

    None: all; empty: none; a negative index ends the list, as in CUDA (so `-1` means none). CUDA also ends the
    list, silently, at a device that does not exist; we refuse it, since a graph on fewer GPUs helps nobody.
    """
    if visible is None:
        return tuple(devices)
    tokens = []
    for token in _split(visible):
        if token.removeprefix("-").isdecimal() and int(token) < 0:
            break
        tokens.append(token)
    return _select(devices, tokens, f"CUDA_VISIBLE_DEVICES={visible}")


def chosen_by_option(
    devices: Sequence[GpuDevice], visible: Sequence[GpuDevice], wanted: Sequence[str] | None
) -> tuple[GpuDevice, ...]:
    """The visible devices that `--gpus` names. A device that the environment hides stays hidden."""
    if wanted is None:
        return tuple(visible)
    origin = f"--gpus {','.join(wanted)}"
    chosen = _select(devices, wanted, origin)
    hidden = [device for device in chosen if device not in visible]
    if hidden:
        raise GpuError(
            f"{origin}: your CUDA_VISIBLE_DEVICES hides {_listed(hidden)} and leaves {_listed(visible)}; "
            "unset it or choose among these"
        )
    return chosen


def _select(devices: Sequence[GpuDevice], tokens: Sequence[str], origin: str) -> tuple[GpuDevice, ...]:
    found: dict[str, GpuDevice] = {}
    for token in tokens:
        device = _find(devices, token, origin)
        if device.uuid in found:
            raise GpuError(f"{origin}: GPU {device.index} ({device.uuid}) is named twice")
        found[device.uuid] = device
    return tuple(sorted(found.values(), key=lambda device: device.index))


def _find(devices: Sequence[GpuDevice], token: str, origin: str) -> GpuDevice:
    if token.startswith("MIG-"):
        raise GpuError(f"{origin}: {token} is a MIG slice; whole GPUs only (UUIDs that begin with GPU-)")
    if token.isdecimal():
        matches = [device for device in devices if device.index == int(token)]
    else:
        matches = [device for device in devices if token.startswith("GPU-") and device.uuid.startswith(token)]
    if len(matches) == 1:
        return matches[0]
    what = f"{token!r} fits more than one GPU" if matches else f"there is no GPU {token!r}"
    raise GpuError(f"{origin}: {what}; this host has {_listed(devices)}")


def _listed(devices: Sequence[GpuDevice]) -> str:
    return ", ".join(f"{device.index} ({device.uuid})" for device in devices) or "none"


class SimInventory:
    """`count` idle 80 GiB devices, always the same: NVLink inside a NUMA node of four, the system bus between."""

    simulated = True

    def __init__(self, count: int) -> None:
        uuids = [simulated_uuid(index) for index in range(count)]
        self._devices = tuple(
            GpuDevice(
                index=index,
                uuid=uuid,
                name="Simulated GPU 80GB",
                memory_total_bytes=SIM_MEMORY_BYTES,
                memory_used_bytes=0,
                numa_node=index // SIM_GPUS_PER_NODE,
                links={peer: _sim_link(index, i) for i, peer in enumerate(uuids) if i != index},
            )
            for index, uuid in enumerate(uuids)
        )

    def sample(self) -> tuple[GpuDevice, ...]:
        return self._devices

    def close(self) -> None:
        """Nothing is held."""


def _sim_link(a: int, b: int) -> int:
    return LINK_NVLINK + _SIM_NVLINKS if a // SIM_GPUS_PER_NODE == b // SIM_GPUS_PER_NODE else LINK_SYSTEM


class NvmlInventory:
    """The host's NVIDIA GPUs, restricted to what the caller may see and asked for. Threads may share one.

    `visible` is the caller's `CUDA_VISIBLE_DEVICES`, `wanted` the parts of `--gpus`.
    Indices are NVML's (PCI bus order), as `nvidia-smi` shows them.
    """

    simulated = False

    def __init__(self, *, wanted: Sequence[str] | None = None, visible: str | None = None) -> None:
        self._wanted = wanted
        self._visible = visible
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._links: dict[tuple[str, ...], dict[str, dict[str, int]]] = {}

    def sample(self) -> tuple[GpuDevice, ...]:
        with self._lock:
            devices = self._all()
        if not devices:
            raise GpuError("the NVIDIA driver reports no GPU; on a machine without one use --gpus sim:8")
        return chosen_by_option(devices, visible_to_cuda(devices, self._visible), self._wanted)

    def close(self) -> None:
        with self._lock:
            nvml, self._nvml = self._nvml, None
            if nvml is not None:
                nvml.nvmlShutdown()

    def _all(self) -> tuple[GpuDevice, ...]:
        nvml = self._open()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            uuids = tuple(nvml.nvmlDeviceGetUUID(handle) for handle in handles)
        except nvml.NVMLError as error:
            raise GpuError(f"the NVIDIA driver does not answer: {error}; see `nvidia-smi`") from error
        if uuids not in self._links:  # links do not change while we run, but the set of GPUs may
            self._links = {uuids: links_between(nvml, dict(zip(uuids, handles, strict=True)))}
        links = self._links[uuids]
        return tuple(
            _device(nvml, index, uuid, handle, links[uuid])
            for index, (uuid, handle) in enumerate(zip(uuids, handles, strict=True))
        )

    def _open(self) -> Any:
        if self._nvml is None:
            import pynvml  # provided by nvidia-ml-py; imported late because most commands need no GPU

            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise GpuError(
                    f"GPUs are needed, but there is no usable NVIDIA driver here ({error}); "
                    "to run without GPUs use --gpus sim:8"
                ) from error
            self._nvml = pynvml
        return self._nvml


def _device(nvml: Any, index: int, uuid: str, handle: Any, links: Mapping[str, int]) -> GpuDevice:
    total, used = _memory(nvml, handle)
    name = optional(nvml, "nvmlDeviceGetName", handle)
    return GpuDevice(
        index=index,
        uuid=uuid,
        name="unknown GPU" if isinstance(name, Missing) else str(name),
        memory_total_bytes=total,
        memory_used_bytes=used,
        processes=_processes(nvml, handle),
        numa_node=numa_node(nvml, handle),
        links=links,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | Missing, int | Missing]:
    """Total and used bytes. Version 2 of the call leaves the driver's own reserve out of `used`.

    Version 1 counts that reserve: over 512 MiB on an idle Hopper, which would look like another user's process.
    """
    memory = optional(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    if isinstance(memory, Missing):
        memory = optional(nvml, "nvmlDeviceGetMemoryInfo", handle)  # drivers before 510
    if isinstance(memory, Missing):
        return memory, memory
    return int(memory.total), int(memory.used)


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | Missing:
    compute = optional(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if isinstance(compute, Missing):
        return compute
    graphics = optional(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
    found: dict[int, GpuProcess] = {}
    for process in () if isinstance(graphics, Missing) else graphics:
        found[process.pid] = GpuProcess(process.pid, _process_name(nvml, process.pid), _used(process), "graphics")
    for process in compute:  # last: a process that is both counts as compute
        found[process.pid] = GpuProcess(process.pid, _process_name(nvml, process.pid), _used(process))
    return tuple(found[pid] for pid in sorted(found))


def _used(process: Any) -> int | Missing:
    """None where the driver does not say (a container without permission, WDDM)."""
    return Missing("not reported") if process.usedGpuMemory is None else int(process.usedGpuMemory)


def _process_name(nvml: Any, pid: int) -> str:
    """The program's name; NVML gives a path, and nothing for a process in another container."""
    name = optional(nvml, "nvmlSystemGetProcessName", pid)
    if not isinstance(name, Missing) and name:
        return Path(str(name)).name
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(name not visible)"
