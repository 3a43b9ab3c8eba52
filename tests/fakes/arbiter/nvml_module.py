"""A GPU driver for real processes on a host without one: a `pynvml.py` in the folder where they run."""

from __future__ import annotations

NVML = '''\
"""A driver with four GPUs, which hangs for ever in every call once there is a file `hang` beside it.

Their UUIDs are those of its folder: locks of GPUs are host-wide.
"""
import threading
import zlib
from pathlib import Path

HANG = Path(__file__).with_name("hang")
HOST = zlib.crc32(str(Path(__file__).parent).encode())
NVML_NVLINK_MAX_LINKS = NVML_AFFINITY_SCOPE_NODE = 0
NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50
nvmlMemory_v2 = 2


class NVMLError(Exception):
    pass


class Memory:
    total, used = 80 * 2**30, 0


ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 4,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{HOST:08x}-0000-0000-0000-{handle:012d}",
    "nvmlDeviceGetMemoryInfo": lambda handle, version=1: Memory(),
    "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
}


def __getattr__(name):
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def call(*args):
        if HANG.exists():
            threading.Event().wait()
        if name not in ANSWERS:
            raise NVMLError("Not Supported")
        return ANSWERS[name](*args)

    return call
'''
