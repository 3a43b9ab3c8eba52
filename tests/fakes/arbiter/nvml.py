"""A fake of the C library libnvidia-ml, under the real `pynvml`: its structures and error mapping are tested too.

`install(monkeypatch, [FakeGpu(...), ...])` puts it in place; a function that is not here is "Function Not Found".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    import pytest

GIB = 1024**3


@dataclass
class FakeGpu:
    """One device. `unsupported` names C functions that answer NVML_ERROR_NOT_SUPPORTED for it."""

    uuid: str
    total: int = 80 * GIB
    used: int = 0
    reserved: int = 600 * 1024**2
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    numa_mask: int = 1
    bus_id: str = "00000000:00:00.0"
    nvlink_to: list[str] = field(default_factory=list)
    """Bus ids of the far ends; `switch` for an NVSwitch."""
    mig: int = 0
    uncorrected_errors: int = 0
    remap: tuple[int, int] = (0, 0)
    """A row remap is pending; one has failed."""
    throttled: int = 0
    compute_mode: int = 0
    lanes: tuple[int, int] = (16, 16)
    """PCIe lanes in use; those of the device."""
    fabric: int = pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    unsupported: set[str] = field(default_factory=set)


def _out(reference: Any) -> Any:
    return reference._obj


class FakeNvmlLib:
    """Shows what `pynvml.nvmlLib` would be. `levels[i, j]` (i < j) is the common ancestor; default SYSTEM."""

    def __init__(self, gpus: list[FakeGpu], names: dict[int, str], levels: dict[tuple[int, int], int]) -> None:
        self.gpus = gpus
        self.names = names
        self.levels = levels
        self.initialised = 0
        self.calls: list[str] = []
        self.answers = threading.Event()
        """Cleared, every call hangs until it is set again, as below a stuck driver."""
        self.answers.set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        try:
            handler = getattr(FakeNvmlLib, "_c_" + name)
        except AttributeError:
            raise AttributeError(name) from None

        def call(*args: Any) -> int:
            self.calls.append(name)
            self.answers.wait()
            return int(handler(self, *args) or pynvml.NVML_SUCCESS)

        return call

    def _gpu(self, handle: Any) -> FakeGpu:
        return self.gpus[self._position(handle)]

    def _position(self, handle: Any) -> int:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        assert address is not None
        return address - 1

    def _c_nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> None:
        buffer.value = b"570.86.10"

    def _c_nvmlSystemGetCudaDriverVersion(self, version: Any) -> None:
        _out(version).value = 12080

    def _c_nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:
        _out(current).value = _out(pending).value = self._gpu(handle).mig

    def _c_nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, count: Any) -> None:
        assert (kind.value, counter.value) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        _out(count).value = self._gpu(handle).uncorrected_errors

    def _c_nvmlDeviceGetRemappedRows(self, handle: Any, *out: Any) -> None:
        for reference, value in zip(out, (0, 0, *self._gpu(handle).remap), strict=True):
            _out(reference).value = value

    def _c_nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> None:
        _out(reasons).value = self._gpu(handle).throttled

    def _c_nvmlDeviceGetComputeMode(self, handle: Any, mode: Any) -> None:
        _out(mode).value = self._gpu(handle).compute_mode

    def _c_nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, width: Any) -> None:
        _out(width).value = self._gpu(handle).lanes[0]

    def _c_nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, width: Any) -> None:
        _out(width).value = self._gpu(handle).lanes[1]

    def _c_nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> None:
        _out(info).state = self._gpu(handle).fabric

    def _c_nvmlInitWithFlags(self, flags: int) -> None:
        self.initialised += 1

    def _c_nvmlShutdown(self) -> None:
        self.initialised -= 1

    def _c_nvmlDeviceGetCount_v2(self, count: Any) -> None:
        _out(count).value = len(self.gpus)

    def _c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        ctypes.c_void_p.from_address(ctypes.addressof(_out(handle))).value = index.value + 1

    def _c_nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = self._gpu(handle).uuid.encode()

    def _c_nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = b"Fake H200"

    def _c_nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int | None:
        gpu = self._gpu(handle)
        if "nvmlDeviceGetMemoryInfo_v2" in gpu.unsupported:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        out = _out(memory)
        out.total, out.used, out.reserved = gpu.total, gpu.used, gpu.reserved
        out.free = gpu.total - gpu.used - gpu.reserved
        return None

    def _c_nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int | None:
        gpu = self._gpu(handle)
        if "nvmlDeviceGetMemoryInfo" in gpu.unsupported:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        out = _out(memory)
        out.total, out.used = gpu.total, gpu.used + gpu.reserved
        out.free = out.total - out.used
        return None

    def _processes(self, handle: Any, function: str, found: list[tuple[int, int | None]], count: Any, out: Any) -> int:
        if function in self._gpu(handle).unsupported:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not found:
            _out(count).value = 0
            return int(pynvml.NVML_SUCCESS)
        if out is None:
            _out(count).value = len(found)
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for slot, (pid, used) in zip(out, found, strict=False):
            slot.pid = pid
            slot.usedGpuMemory = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value if used is None else used
        _out(count).value = len(found)
        return int(pynvml.NVML_SUCCESS)

    def _c_nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:
        gpu = self._gpu(handle)
        return self._processes(handle, "nvmlDeviceGetComputeRunningProcesses_v3", gpu.compute, count, out)

    def _c_nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:
        gpu = self._gpu(handle)
        return self._processes(handle, "nvmlDeviceGetGraphicsRunningProcesses_v3", gpu.graphics, count, out)

    def _c_nvmlSystemGetProcessName(self, pid: Any, buffer: Any, size: Any) -> int | None:
        if pid.value not in self.names:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        buffer.value = self.names[pid.value].encode()
        return None

    def _c_nvmlDeviceGetMemoryAffinity(self, handle: Any, size: Any, nodes: Any, scope: Any) -> int | None:
        gpu = self._gpu(handle)
        if "nvmlDeviceGetMemoryAffinity" in gpu.unsupported:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        target = getattr(nodes, "_obj", nodes)
        target[0] = gpu.numa_mask
        return None

    def _c_nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any, level: Any) -> None:
        pair = sorted((self._position(a), self._position(b)))
        _out(level).value = self.levels.get((pair[0], pair[1]), pynvml.NVML_TOPOLOGY_SYSTEM)

    def _c_nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> None:
        _out(pci).busId = self._gpu(handle).bus_id.encode()

    def _c_nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, active: Any) -> int | None:
        if int(getattr(link, "value", link)) >= len(self._gpu(handle).nvlink_to):
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        _out(active).value = 1
        return None

    def _c_nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: Any, kind: Any) -> None:
        end = self._gpu(handle).nvlink_to[int(getattr(link, "value", link))]
        _out(kind).value = (
            pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if end == "switch" else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        )

    def _c_nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: Any, pci: Any) -> None:
        _out(pci).busId = self._gpu(handle).nvlink_to[int(getattr(link, "value", link))].encode()


def install(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[FakeGpu],
    *,
    names: dict[int, str] | None = None,
    levels: dict[tuple[int, int], int] | None = None,
) -> FakeNvmlLib:
    """Put the fake in place of the driver's library for this test."""
    fake = FakeNvmlLib(gpus, names or {}, levels or {})
    monkeypatch.setattr(pynvml, "nvmlLib", fake)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return fake
