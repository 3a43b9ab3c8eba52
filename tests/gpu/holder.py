"""Takes memory of a card, as an engine does: `python -m tests.gpu.holder BYTES` holds it until its input ends.

No torch: libcuda through ctypes. With DYN_FAKE_CARDS (see `fake_cards.py`) the card is a folder.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from pathlib import Path

FAKE = "DYN_FAKE_CARDS"
GIB = 1024**3


def hold(size: int) -> tuple[int, str]:
    """How many devices this process sees, and the UUID of the one of which it holds so many bytes, for as long as it
    lives. Ends the process where CUDA refuses."""
    return _hold_fake(Path(os.environ[FAKE])) if FAKE in os.environ else _hold_cuda(size)


def _hold_fake(folder: Path) -> tuple[int, str]:
    seen = [path for path in sorted(folder.iterdir()) if path.name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    (seen[0] / str(os.getpid())).touch()
    return len(seen), seen[0].name


def _hold_cuda(size: int) -> tuple[int, str]:
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        code = getattr(cuda, name)(*args)
        if code != 0:
            sys.exit(f"{name}: CUDA error {code}")

    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    pointer, identity = ctypes.c_uint64(), (ctypes.c_ubyte * 16)()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDeviceGetUuid", ctypes.byref(identity), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    return count.value, f"GPU-{uuid.UUID(bytes=bytes(identity))}"


if __name__ == "__main__":
    print(*hold(int(sys.argv[1])), flush=True)
    sys.stdin.readline()
