"""Reads drivers and GPUs. Every function here may hang with the driver: `reading` gives it a deadline."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from dynamo_local.core.doctor.gpus import DeviceFiles, Driver, Gpu, Visible
from dynamo_local.core.doctor.runs import GpuLock
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError
from dynamo_local.system.gpu_locks import GpuLocks, lock_folders
from dynamo_local.system.gpus import NvmlInventory, optional, visible_to_cuda
from dynamo_local.system.processes import is_alive

NVIDIA, DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
"""PCI vendor, and the classes of GPUs with and without a display."""


def nvml(env: Mapping[str, str]) -> dict[str, Any]:
    """The facts `driver`, `gpus`, `visible`, and `gpu_process_users`: pid to user name."""
    inventory = NvmlInventory()
    try:
        devices = inventory.sample()
        import pynvml

        gpus = tuple(_gpu(pynvml, device) for device in devices)
        driver = _driver(pynvml)
    except GpuError as error:
        why = Missing(f"NVML: {error.__cause__ or error}")
        return {
            "driver": Driver(error=str(error.__cause__ or error)),
            **dict.fromkeys(("gpus", "visible", "gpu_process_users"), why),
        }
    finally:
        inventory.close()
    pids = [process.pid for each in devices if not isinstance(each.processes, Missing) for process in each.processes]
    return {
        "driver": driver,
        "gpus": gpus,
        "visible": _visible(devices, env.get("CUDA_VISIBLE_DEVICES")),
        "gpu_process_users": {pid: user for pid in pids if (user := _user(pid)) is not None},
    }


def _driver(nvml: Any) -> Driver:
    version, cuda = optional(nvml, "nvmlSystemGetDriverVersion"), optional(nvml, "nvmlSystemGetCudaDriverVersion")
    if not isinstance(cuda, Missing):
        cuda = (int(cuda) // 1000, int(cuda) % 1000 // 10)
    return Driver(None, version if isinstance(version, Missing) else str(version), cuda)


def _gpu(nvml: Any, device: GpuDevice) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(device.index)

    def of(call: str, *args: Any) -> Any:
        return optional(nvml, call, handle, *args)

    mig, remap = of("nvmlDeviceGetMigMode"), of("nvmlDeviceGetRemappedRows")
    lanes = of("nvmlDeviceGetCurrPcieLinkWidth"), of("nvmlDeviceGetMaxPcieLinkWidth")
    return Gpu(
        device,
        mig=mig if isinstance(mig, Missing) else bool(mig[0]),
        uncorrected_errors=of(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap=remap if isinstance(remap, Missing) else (bool(remap[2]), bool(remap[3])),
        throttled=of("nvmlDeviceGetCurrentClocksThrottleReasons"),
        compute_mode=of("nvmlDeviceGetComputeMode"),
        pcie=next((lane for lane in lanes if isinstance(lane, Missing)), lanes),
        nvlinks=_nvlinks(nvml, handle),
        fabric=_fabric(nvml, handle),
    )


def _nvlinks(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = optional(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if isinstance(state, Missing):
            break  # links are numbered without gaps
        active += bool(state)
    return active


def _fabric(nvml: Any, handle: Any) -> int | Missing:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    answer = optional(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    return answer if isinstance(answer, Missing) else int(info.state)


def _visible(devices: tuple[GpuDevice, ...], setting: str | None) -> Visible:
    try:
        return Visible(setting, tuple(device.index for device in visible_to_cuda(devices, setting)))
    except GpuError as error:
        return Visible(setting, error=str(error))


def _user(pid: int) -> str | None:
    """None for a process that cannot be seen from here, such as one of another container."""
    try:
        return psutil.Process(pid).username()
    except psutil.Error:
        return None


def device_files(root: Path) -> DeviceFiles:
    """The driver's device files, and NVIDIA's GPUs on the PCI bus. Without either it is empty."""
    nodes = {f"/dev/{node.name}": os.access(node, os.R_OK | os.W_OK) for node in sorted(root.glob("dev/nvidia*"))}
    pci = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES):
            pci.append(device.name)
    return DeviceFiles(tuple(pci), nodes)


def numa_cpus(root: Path) -> dict[int, frozenset[int]]:
    """NUMA node to its processors."""
    return {
        int(node.name.removeprefix("node")): _numbers((node / "cpulist").read_text())
        for node in root.glob("sys/devices/system/node/node[0-9]*")
    }


def _numbers(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(n for first, _, last in parts for n in range(int(first), int(last or first) + 1))


def gpu_locks(env: Mapping[str, str]) -> tuple[GpuLock, ...]:
    """The GPU locks that somebody holds, in all folders of locks. An unknown holder counts as alive."""
    found = {}
    for folder in lock_folders(env):
        for path in sorted(folder.glob("*.lock")):
            holder = GpuLocks(folder).holder_of(path.stem)
            if holder is not None:
                alive = not holder.pid or is_alive(holder.pid)
                found[path.stem] = GpuLock(path.stem, str(holder), holder.namespace, alive)
    return tuple(found.values())
