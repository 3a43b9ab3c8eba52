"""Cards that are folders, for a machine without one: what can run there of these checks, runs.

`$DYN_FAKE_CARDS/UUID/PID` is a process that holds memory of that card for as long as it lives. `site/pynvml.py`, first
on PYTHONPATH, puts this below the real `pynvml` of every process; what CUDA itself does is not faked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from tests.fakes.arbiter.nvml import GIB, FakeGpu, FakeNvmlLib

if TYPE_CHECKING:
    import pytest

SITE = Path(__file__).with_name("site")


def make(folder: Path, count: int = 2) -> Path:
    for number in range(count):
        (folder / f"GPU-fa{number}e0000-0000-4000-8000-00000000000{number}").mkdir(parents=True)
    return folder


class CardsOnDisk(FakeNvmlLib):
    """The driver's library of those cards."""

    def __init__(self, folder: Path) -> None:
        super().__init__([FakeGpu(path.name) for path in sorted(folder.iterdir())], {}, {})
        self._folder = folder

    def _gpu(self, handle: Any) -> FakeGpu:
        gpu = super()._gpu(handle)
        pids = [int(path.name) for path in (self._folder / gpu.uuid).iterdir()]
        gpu.compute = [(pid, GIB) for pid in pids if _lives(pid)]
        gpu.used = GIB * len(gpu.compute)
        return gpu


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def install(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(pynvml, "nvmlLib", CardsOnDisk(folder))
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def library() -> CardsOnDisk:
    return CardsOnDisk(Path(os.environ["DYN_FAKE_CARDS"]))
