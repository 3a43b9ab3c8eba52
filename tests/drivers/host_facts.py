"""This host's processes and shared memory, as Linux shows them: for tests that nothing is left behind."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

UNIT_TESTS_MEMORY = "unit_engine_"
"""Unit tests kill processes with memory of this name, beside tests that look for what a graph left."""


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(UNIT_TESTS_MEMORY)}


def mapped_shared_memory(pid: int) -> set[int]:
    """Inodes: a semaphore is mapped before it is given its name."""
    lines = about(pid, "maps").decode(errors="replace").splitlines()
    return {int(line.split()[4]) for line in lines if "/dev/shm/" in line}


def inode(path: Path) -> int | None:
    """None where the file is gone."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def sockets(folder: Path) -> Iterator[Path]:
    """Unix sockets below a folder; what vanishes meanwhile is none (`Path.rglob` would raise)."""
    for where, _, names in os.walk(folder):
        yield from (path for name in names if is_socket(path := Path(where, name)))


def pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def about(pid: int, *files: str) -> bytes:
    """Environment and command line of a process; empty for a zombie, a stranger's, or one that is gone."""
    text = b""
    for name in files or ("environ", "cmdline"):
        try:
            text += Path(f"/proc/{pid}/{name}").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return text


def descriptors(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
