"""The pool of spares on a host whose processes are threads that speak the protocol: what is kept, and what fails."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.prewarmed import PrewarmedHost, PrewarmedKind, PrewarmedProcesses, PrewarmedRules
from dynamo_local.clock import AsyncioClock
from dynamo_local.core.prewarmed import early, is_prewarmed
from dynamo_local.system import fd_messages
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import ExitCallback, LaunchSpec
from tests.drivers.eventually import eventually

KIND = PrewarmedKind("sim", "/", (("PATH", "/bin"),))
OTHER = PrewarmedKind("vllm", "/", (("PATH", "/bin"),))
GONE_PID = 2**22 + 1
"""More than the kernel gives: to end it ends nobody."""


class Host:
    """A `PrewarmingHost`. `answers` is what each spare does with its end of the socket."""

    def __init__(self, answers: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
        self.on_exit: ExitCallback | None = None
        self.answers = answers
        self.started: list[str] = []
        self.renamed: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.orders: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start_process(self, spec: LaunchSpec) -> int:
        self.started.append(spec.name)
        if spec.inherited_fds:
            theirs = socket.socket(fileno=os.dup(spec.inherited_fds[0]))
            theirs.setblocking(False)
            self._tasks.append(asyncio.create_task(self.answers(theirs)))
        return GONE_PID + len(self.started)

    async def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def rename_process(self, name: str, spec: LaunchSpec) -> int:
        self.renamed.append((name, spec.name))
        return GONE_PID


async def obeys(connection: socket.socket) -> None:
    """Warm at once; becomes whatever it is told."""
    with connection:
        await fd_messages.asend(connection, {"warm": True})
        order = await fd_messages.areceive(connection)
        await fd_messages.asend(connection, {"became": order["env"]["DYN_WATCHER_NAME"]})


async def refuses(connection: socket.socket) -> None:
    with connection:
        await fd_messages.asend(connection, {"warm": True})
        await fd_messages.areceive(connection)
        await fd_messages.asend(connection, {"error": "the marks need 9999 bytes"})


async def fails(connection: socket.socket) -> None:
    with connection:
        await fd_messages.asend(connection, {"error": "there is no vllm here"})


async def nothing() -> None:
    """Writes nothing down."""


@asynccontextmanager
async def pool(
    tmp_path: Path, host: Host, *, calm: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[PrewarmedProcesses, list]]:
    told: list[str] = []
    tasks: set[asyncio.Future[None]] = set()
    rules = PrewarmedRules(1, lambda name: {"DYN_WATCHER_NAME": name}, None, None, None, 5.0)
    paths = Paths.of("dynamo", {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)})
    paths.logs.mkdir(parents=True)
    spares = PrewarmedProcesses(
        host,
        paths,
        rules,
        AsyncioClock(),
        wanted=lambda: (KIND,),
        calm=calm,
        background=lambda work: tasks.add(asyncio.ensure_future(work)),
        on_change=nothing,
        tell=lambda text, about=None: told.append(text),
    )
    running = asyncio.create_task(spares.run())
    try:
        yield spares, told
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await spares.close()
        await asyncio.gather(*tasks)


def spec(tmp_path: Path) -> LaunchSpec:
    return LaunchSpec("dynamo_W", ("python",), {"DYN_WATCHER_NAME": "dynamo_W"}, "/", tmp_path / "w.log")


async def test_a_spare_becomes_the_worker_and_the_next_one_is_started(tmp_path: Path) -> None:
    host = Host(obeys)
    async with pool(tmp_path, host) as (spares, told):
        await eventually(lambda: spares.counts()["sim", "warm"])
        assert await PrewarmedHost(host, spares, lambda name: KIND).start_process(spec(tmp_path)) == GONE_PID
        assert host.renamed == [("dynamo_spare", "dynamo_W")]
        await eventually(lambda: len(host.started) == 2)
        assert told == []


async def test_one_of_another_kind_is_not_taken(tmp_path: Path) -> None:
    host = Host(obeys)
    async with pool(tmp_path, host) as (spares, _):
        await eventually(lambda: spares.counts()["sim", "warm"])
        starting = PrewarmedHost(host, spares, lambda name: OTHER)
        pid = await starting.start_process(spec(tmp_path))
        assert (host.renamed, host.started[-1]) == ([], "dynamo_W")
        assert not starting.was_prewarmed(pid)


async def test_one_that_refuses_is_ended_and_the_worker_is_started_anew(tmp_path: Path) -> None:
    host = Host(refuses)
    async with pool(tmp_path, host) as (spares, told):
        await eventually(lambda: spares.counts()["sim", "warm"])
        starting = PrewarmedHost(host, spares, lambda name: KIND)
        assert not starting.was_prewarmed(await starting.start_process(spec(tmp_path)))
        assert (host.renamed, host.started) == ([], ["dynamo_spare", "dynamo_W"])
        assert "9999 bytes" in told[0]


async def test_one_that_cannot_be_made_is_tried_again_later_and_told(tmp_path: Path) -> None:
    host = Host(fails)
    async with pool(tmp_path, host) as (spares, told):
        await eventually(lambda: told)
        status = spares.status()
        assert "there is no vllm here" in status["reason"]
        assert 0.0 < status["next_try_s"] <= 1.0
        assert len(host.started) == 1


async def test_none_is_started_while_a_worker_comes_up(tmp_path: Path) -> None:
    host = Host(obeys)
    asked = []

    def calm() -> bool:
        asked.append(len(host.started))
        return len(asked) > 3

    async with pool(tmp_path, host, calm=calm) as (spares, _):
        await eventually(lambda: spares.counts()["sim", "warm"])
        assert asked == [0, 0, 0, 0]


def test_what_may_come_late_and_what_must_be_there_from_the_beginning() -> None:
    env = {"HF_HOME": "/m", "CUDA_VISIBLE_DEVICES": "GPU-1", "DYN_LOG": "x", "MY_KEYS": "k", "ETCD_ENDPOINTS": "e"}
    assert early(env, ["MY_KEYS"]) == {"HF_HOME": "/m"}


def test_a_spare_is_known_by_its_name() -> None:
    assert [is_prewarmed(name, "a") for name in ("a_spare", "a_spare_12", "a_spare_x", "a_spares", "b_spare")] == [
        True,
        True,
        False,
        False,
        False,
    ]
