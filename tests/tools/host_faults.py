"""Faults of the host around a process: a disk without room, no file descriptors. For as long as a block lasts."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.drivers.host_facts import descriptors
from tests.drivers.served import Served, until

PATIENCE_S = 40.0


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A disk of its own at `folder`, of that many bytes; False where we may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):  # to the last byte
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def no_descriptors(served: Served) -> Iterator[None]:
    """The arbiter may have no more than it has, and idle connections take those that are left among them.

    The block begins when it has noticed. Before that nobody may connect to its control socket: libzmq would end it.
    """
    status = served.status()
    url, process = urlsplit(status["metrics_url"]), psutil.Process(status["arbiter_pid"])
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    limit = max(descriptors(process.pid)) + 1
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, hard))

    def told() -> int:
        return served.log("arbiter").count("no file descriptors left")

    before = told()
    with ExitStack() as connections:

        def noticed() -> bool:
            """The arbiter opens descriptors for a moment. The next connection takes what it gives back."""
            if len(descriptors(process.pid)) < limit:
                connections.enter_context(socket.create_connection((url.hostname or "", url.port or 0)))
            return told() > before

        try:
            until(noticed, PATIENCE_S)  # it has let its own go
            yield
        finally:
            process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
