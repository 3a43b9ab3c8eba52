"""The supervisor's needs of a process host: our arbiter, a stock circusd by its client, and the fake.

One suite for all three; what is circusd's alone is in `test_circus_client_host.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.circus_plugins.arbiter import DynamoArbiter
from dynamo_local.circus_plugins.client_host import CircusClientHost
from dynamo_local.system.process_host import LaunchSpec, ProcessHost
from dynamo_local.system.processes import is_alive, kill_session, wait_exit
from tests.drivers.stock_circusd import StockCircusd
from tests.fakes.arbiter.process_host import FakeProcessHost

RUNS = (sys.executable, "-I", "-S", "-c", "import time; print('runs', flush=True); time.sleep(600)")
ENDS_7 = (sys.executable, "-I", "-S", "-c", "raise SystemExit(7)")
ENDS_0 = (sys.executable, "-I", "-S", "-c", "")
NOTICED_S = 0.1


class RealPlace:
    """A host with real processes."""

    def __init__(self, lister: Any) -> None:
        self._lister = lister

    async def listed(self) -> set[str]:
        return set(await self._lister())

    def signal(self, pid: int, signum: signal.Signals) -> None:
        os.kill(pid, signum)

    def runs(self, pid: int) -> bool:
        return is_alive(pid)


class FakePlace:
    """The fake's."""

    def __init__(self, host: FakeProcessHost) -> None:
        self._host = host

    async def listed(self) -> set[str]:
        return {name.lower() for name in self._host.watchers}

    def signal(self, pid: int, signum: signal.Signals) -> None:
        self._host.signal(pid, signum)

    def runs(self, pid: int) -> bool:
        return self._host.runs(pid)


Place = RealPlace | FakePlace


class Tried:
    """A host under test, with its exits recorded."""

    def __init__(self, kind: str, host: ProcessHost, place: Place, folder: Path) -> None:
        self.kind = kind
        self.host = host
        self.place = place
        self.folder = folder
        self.pids: list[int] = []
        self.exits: asyncio.Queue[tuple[str, int, int | None, float]] = asyncio.Queue()
        host.on_exit = lambda name, pid, code: self.exits.put_nowait((name, pid, code, time.monotonic()))

    def spec(self, name: str, argv: tuple[str, ...], **changes: Any) -> LaunchSpec:
        spec = LaunchSpec(
            name,
            argv,
            env={"PATH": os.environ["PATH"], "SOME_TOKEN": "hush"},
            cwd=str(self.folder),
            log_file=self.folder / f"{name}.log",
            graceful_timeout_s=5.0,
            death_signal=signal.SIGKILL,
        )
        return replace(spec, **changes)

    async def start(self, name: str, argv: tuple[str, ...] = RUNS, **changes: Any) -> int:
        pid = await self.host.start_process(self.spec(name, argv, **changes))
        self.pids.append(pid)
        return pid

    async def exit(self) -> tuple[str, int, int | None]:
        name, pid, code, _ = await asyncio.wait_for(self.exits.get(), 10)
        return name, pid, code

    async def end(self, pid: int) -> None:
        self.place.signal(pid, signal.SIGKILL)
        assert (await self.exit())[1] == pid


@asynccontextmanager
async def own_arbiter(folder: Path) -> AsyncIterator[tuple[ProcessHost, Place]]:
    arbiter = DynamoArbiter(endpoint=f"ipc://{folder}/ctl.sock", pubsub_endpoint=f"ipc://{folder}/pub.sock")
    await arbiter.start()

    async def lister() -> list[str]:
        return sorted(watcher.name.lower() for watcher in arbiter.watchers)

    yield arbiter, RealPlace(lister)
    for watcher in list(arbiter.watchers):
        for pid in list(watcher.processes):
            os.kill(pid, signal.SIGKILL)
            await wait_exit(pid, 5)
    await asyncio.sleep(0)
    await arbiter.close()


@asynccontextmanager
async def stock(circusd: StockCircusd, folder: Path) -> AsyncIterator[tuple[ProcessHost, Place]]:
    host = CircusClientHost(circusd.endpoint, socket=folder / "run.sock", circusd_pid=circusd.pid)
    await host.start()

    async def lister() -> list[str]:
        names: list[str] = (await host.circusd.call("list"))["watchers"]
        return [name for name in names if name != "other"]

    yield host, RealPlace(lister)
    left = [(name, pid) for name in await lister() for pid in (await host.circusd.call("list", name=name))["pids"]]
    for _, pid in left:
        kill_session(pid)
        await wait_exit(pid, 5)
    await asyncio.sleep(0.01)
    for name in await lister():
        await host.forget(name)
    await host.close()


@pytest.fixture(scope="module")
def circusd() -> Iterator[StockCircusd]:
    """One stock circusd with a watcher of somebody's own, for all tests."""
    with (
        tempfile.TemporaryDirectory(prefix="cd-") as folder,
        StockCircusd(Path(folder), "[watcher:other]\ncmd = sleep 600\n") as circusd,
    ):
        yield circusd


@pytest.fixture(params=["arbiter", "circusd", "fake"])
async def tried(request: pytest.FixtureRequest) -> AsyncIterator[Tried]:
    kind: str = request.param
    with tempfile.TemporaryDirectory(prefix="ph-") as name:  # short: a unix socket's path has 107 bytes
        folder = Path(name)
        if kind == "fake":
            fake = FakeProcessHost({ENDS_7: 7, ENDS_0: 0})
            yield Tried(kind, fake, FakePlace(fake), folder)
            return
        running = own_arbiter(folder) if kind == "arbiter" else stock(request.getfixturevalue("circusd"), folder)
        async with running as (host, place):
            yield Tried(kind, host, place, folder)


async def test_a_started_process_runs_under_its_name(tried: Tried) -> None:
    pid = await tried.start("ns_A")
    assert tried.place.runs(pid)
    assert await tried.place.listed() == {"ns_a"}


async def test_an_exit_is_told_with_its_code(tried: Tried) -> None:
    for name, argv, code in (("ns_A", ENDS_7, 7), ("ns_B", ENDS_0, 0)):
        pid = await tried.start(name, argv)
        assert await tried.exit() == (name, pid, code)


@pytest.mark.alone
@pytest.mark.timing
async def test_a_killed_process_is_noticed_within_milliseconds(tried: Tried) -> None:
    """circus looks once per `check_delay` (a second here, five by default). A pidfd tells at once."""
    pid = await tried.start("ns_A")
    killed_s = time.monotonic()
    tried.place.signal(pid, signal.SIGKILL)
    name, found, code, told_s = await asyncio.wait_for(tried.exits.get(), 10)
    assert (name, found, code) == ("ns_A", pid, -signal.SIGKILL)
    assert told_s - killed_s < NOTICED_S


async def test_the_pid_is_known_before_the_exit_is_told(tried: Tried) -> None:
    """Otherwise the supervisor would not know the exited process."""
    known: list[int] = []
    seen: list[bool] = []
    tried.host.on_exit = lambda name, pid, code: seen.append(pid in known)

    async def start(name: str) -> None:
        known.append(await tried.host.start_process(tried.spec(name, ENDS_0)))

    await asyncio.gather(*(start(f"ns_{n}") for n in range(8)))
    async with asyncio.timeout(10):
        while len(seen) < 8:
            await asyncio.sleep(0.01)
    assert seen == [True] * 8


async def test_a_name_is_used_again_after_an_exit(tried: Tried) -> None:
    first = await tried.start("ns_A")
    await tried.end(first)
    second = await tried.start("ns_A")
    assert second != first
    assert tried.place.runs(second)
    assert await tried.place.listed() == {"ns_a"}


async def test_a_dead_process_is_not_started_again_by_itself(tried: Tried) -> None:
    """The restart policy is the supervisor's: circus has no back-off (53 spawns in 10 s)."""
    await tried.end(await tried.start("ns_A"))
    await asyncio.sleep(1.2 if tried.kind != "fake" else 0)  # longer than circus's `check_delay`
    assert tried.exits.empty()
    assert await tried.place.listed() == {"ns_a"}
    assert len(tried.pids) == 1


async def test_a_name_in_use_is_refused_and_its_process_lives(tried: Tried) -> None:
    pid = await tried.start("ns_A")
    with pytest.raises(KeyError):
        await tried.start("ns_A")
    assert tried.place.runs(pid)


async def test_a_forgotten_watcher_is_gone(tried: Tried) -> None:
    await tried.end(await tried.start("ns_A"))
    await tried.host.forget("ns_A")
    assert await tried.place.listed() == set()
    assert tried.place.runs(await tried.start("ns_A"))


async def test_forgetting_an_unknown_name_is_no_error(tried: Tried) -> None:
    await tried.host.forget("ns_Nobody")
    await tried.host.forget("ns_Nobody")


async def test_a_missing_program_is_an_oserror_and_leaves_no_process(tried: Tried) -> None:
    """circus answers `add` with ok and tries five times."""
    with pytest.raises(OSError, match="not an executable"):
        await tried.start("ns_A", ("/nonexistent/program",))
    assert tried.exits.empty()
    assert tried.place.runs(await tried.start("ns_A"))


@pytest.mark.timing
async def test_many_starts_at_once(tried: Tried) -> None:
    """Plain circus refused 53 of 60 back-to-back `add`s."""
    names = [f"ns_{n}" for n in range(40)]
    began_s = time.monotonic()
    pids = await asyncio.gather(*(tried.start(name) for name in names))
    assert time.monotonic() - began_s < 10
    assert len(set(pids)) == 40
    assert await tried.place.listed() == set(names)
    for pid in pids:
        tried.place.signal(pid, signal.SIGKILL)
    ended = {(await tried.exit())[1] for _ in pids}
    assert ended == set(pids)
    await asyncio.gather(*(tried.host.forget(name) for name in names))
    assert await tried.place.listed() == set()


async def test_one_start_that_fails_leaves_the_others_alone(tried: Tried) -> None:
    starts = (tried.start("ns_A"), tried.start("ns_B", ("/nonexistent/program",)), tried.start("ns_C"))
    first, failed, last = await asyncio.gather(*starts, return_exceptions=True)
    assert isinstance(failed, OSError)
    assert tried.place.runs(first)
    assert tried.place.runs(last)


async def _written(path: Path) -> str:
    async with asyncio.timeout(10):
        while not (path.exists() and path.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
    return path.read_text()


SHOWS = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import os, sys, time, signal\n"
    "print('cwd', os.getcwd(), flush=True)\n"
    "print('env', sorted(os.environ), flush=True)\n"
    "print('session', os.getsid(0) == os.getpid(), flush=True)\n"
    "print('pipe', open('/proc/self/status').read().split('SigIgn:')[1].split()[0], flush=True)\n"
    "print('fds', sorted(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')"
    " if os.path.exists(f'/proc/self/fd/{fd}')), file=sys.stderr, flush=True)\n"
    "time.sleep(600)",
)


@pytest.fixture
def real(tried: Tried) -> Tried:
    if tried.kind == "fake":
        pytest.skip("the fake has no processes")
    return tried


async def test_a_process_has_its_folder_session_log_and_environment_and_no_other(real: Tried) -> None:
    await real.start("ns_A", SHOWS)
    async with asyncio.timeout(10):
        while "fds" not in await _written(real.folder / "ns_A.log"):
            await asyncio.sleep(0.01)
    log = real.folder / "ns_A.log"
    lines = dict(line.split(" ", 1) for line in log.read_text().splitlines())
    assert lines["cwd"] == str(real.folder)
    assert lines["env"] == "['LC_CTYPE', 'PATH', 'SOME_TOKEN']" or lines["env"] == "['PATH', 'SOME_TOKEN']"
    assert lines["session"] == "True"
    assert int(lines["pipe"], 16) & 1 << signal.SIGPIPE - 1 == 1 << signal.SIGPIPE - 1  # Python's own doing
    assert lines["fds"].count(str(log)) == 2
    assert "pipe:" not in lines["fds"]
    assert "socket:" not in lines["fds"]
    assert log.stat().st_mode & 0o777 == 0o600


async def test_inherited_descriptors_are_the_same_open_files(real: Tried) -> None:
    """A GPU's flock belongs to the open file, so it holds as long as the worker lives."""
    import fcntl

    path = real.folder / "gpu.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    pid = await real.start("ns_A", inherited_fds=(fd,))
    os.close(fd)
    probe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await real.end(pid)
        fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(probe)


async def test_a_folder_that_is_gone_is_an_oserror(real: Tried) -> None:
    with pytest.raises(OSError, match=r"No such file|could not be started"):
        await real.start("ns_A", cwd=str(real.folder / "nowhere"))
    assert real.place.runs(await real.start("ns_B"))


async def test_a_program_that_cannot_be_executed_is_an_oserror(real: Tried) -> None:
    program = real.folder / "program"
    program.write_bytes(b"\x00\x01\x02 no program")
    program.chmod(0o700)
    with pytest.raises(OSError, match=r"Exec format error|could not be started"):
        await real.start("ns_A", (str(program),))
    assert real.place.runs(await real.start("ns_A"))
