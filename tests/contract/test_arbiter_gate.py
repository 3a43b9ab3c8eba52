"""The arbiter's sockets when there are no file descriptors left: libzmq would end the whole process.

Seen: SIGABRT of the arbiter, and the end of all workers, on the `dynamo status` that asked what was wrong.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq

from tests.drivers.host_facts import descriptors
from tests.drivers.served import ROOT, until

ANSWER_MS = 20_000


class Bare:
    """A bare arbiter, and those that connect to it."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process

    def limit(self, more: int) -> None:
        """From now on it may have so many descriptors more than it has."""
        soft = max(descriptors(self.process.pid)) + 1 + more
        psutil.Process(self.process.pid).rlimit(
            psutil.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    def connect(self, stack: ExitStack, name: str) -> None:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(5.0)
        sock.connect(str(self.folder / name))

    def answers(self, timeout_ms: int = ANSWER_MS) -> bool:
        """To a command, within so many milliseconds."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(f"ipc://{self.folder}/ctl.sock")
            client.send(json.dumps({"id": "1", "command": "numwatchers"}).encode())
            return bool(client.poll(timeout_ms)) and json.loads(client.recv())["status"] == "ok"


@pytest.fixture
def bare(short_folder: Path) -> Iterator[Bare]:
    command = (sys.executable, "-m", "tests.tools.bare_arbiter", str(short_folder))
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield Bare(short_folder, process)
        process.stdin.close()
        assert process.wait(20.0) == 0


@pytest.mark.parametrize("more", range(4))
@pytest.mark.parametrize("name", ["ctl.sock", "pub.sock"])
def test_it_lives_without_descriptors_and_answers_when_it_has_some(bare: Bare, name: str, more: int) -> None:
    assert bare.answers()
    bare.limit(more)
    with ExitStack() as connections:
        for _ in range(40):
            bare.connect(connections, name)
        for _ in range(3):
            bare.answers(timeout_ms=200)
        assert bare.process.poll() is None
        used = len(descriptors(bare.process.pid))
    assert bare.answers()
    until(lambda: len(descriptors(bare.process.pid)) < used)


def test_whoever_goes_at_once_costs_nothing(bare: Bare) -> None:
    assert bare.answers()
    before = len(descriptors(bare.process.pid))
    with ExitStack() as connections:
        for _ in range(100):
            bare.connect(connections, "ctl.sock")
    assert bare.answers()
    until(lambda: len(descriptors(bare.process.pid)) <= before)
