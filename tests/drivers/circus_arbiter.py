"""A real arbiter with its control endpoint and a client of that; `Commander` has a fake supervisor behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import zmq
import zmq.asyncio

from dynamo_local.circus_plugins.arbiter import DynamoArbiter
from dynamo_local.system.process_host import LaunchSpec
from dynamo_local.system.processes import wait_exit
from tests.fakes.arbiter.supervisor import FakeSupervisor

PYTHON = sys.executable
WORKER = "dynamo_VllmWorker"


class Harness:
    """An arbiter with its exits recorded, and a client of its control endpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: asyncio.Queue[tuple[str, int, int, float]] = asyncio.Queue()
        self.endpoint = f"ipc://{folder}/ctl.sock"
        self.arbiter = DynamoArbiter(endpoint=self.endpoint, pubsub_endpoint=f"ipc://{folder}/pub.sock")
        self.arbiter.on_exit = lambda name, pid, code: self.exits.put_nowait((name, pid, code, time.monotonic()))

    def spec(self, name: str, code: str, *, asks_itself: bool = False) -> LaunchSpec:
        return LaunchSpec(
            name,
            (PYTHON, "-c", code),
            env={"PATH": os.environ["PATH"], "SOME_TOKEN": "hush", "ROOT": str(Path(__file__).parents[2])},
            cwd=str(self.folder),
            log_file=self.folder / f"{name}.log",
            graceful_timeout_s=5.0,
            death_signal=signal.SIGKILL,
            asks_itself=asks_itself,
        )

    async def run(self, name: str, code: str, *, asks_itself: bool = False) -> int:
        """Start `python -c code` under a new watcher; its pid."""
        return await self.arbiter.start_process(self.spec(name, code, asks_itself=asks_itself))

    async def end(self) -> None:
        for watcher in self.arbiter.watchers:
            for pid in list(watcher.processes):
                os.kill(pid, signal.SIGKILL)
                await wait_exit(pid, 5)
        await asyncio.sleep(0)
        await self.arbiter.close()

    async def ask(self, command: str, **properties: object) -> dict[str, object]:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.endpoint)
            await socket.send(json.dumps({"id": "1", "command": command, "properties": properties}).encode())
            return json.loads(await asyncio.wait_for(socket.recv(), 5))


class Commander(Harness):
    """The harness with a fake supervisor, at the endpoint where `dynamo --namespace dynamo` looks for it."""

    def __init__(self, root: Path) -> None:
        folder = root / "dynamo" / "dynamo"
        folder.mkdir(parents=True)
        super().__init__(folder)
        self.root = root
        self.supervisor = FakeSupervisor([WORKER, f"{WORKER}_1"])
        self.arbiter.supervisor = self.supervisor

    async def dynamo(self, *words: str) -> tuple[int, str, str]:
        """Run the command line in a process of its own: exit code, stdout, stderr."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", "dynamo_local.cli.main", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "HOME": str(self.root),
                "XDG_RUNTIME_DIR": str(self.root),
                "DYN_LOCAL_LOG_DIR": str(self.root / "logs"),
            },
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def commanding() -> AsyncIterator[Commander]:
    """A running arbiter, until its end. The folder is short: a socket lies in it."""
    with tempfile.TemporaryDirectory(prefix="dyn-") as folder:
        commander = Commander(Path(folder))
        await commander.arbiter.start()
        yield commander
        await commander.end()
