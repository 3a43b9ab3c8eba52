"""Our own arbiter beside a stock circusd, as hosts of the same processes: what `docs/circusd.md` says costs more there.

One process after the other on both, in turn, so both see the same machine. The processes only sleep.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Report, at_least, at_most
from dynamo_local.circus_plugins.arbiter import DynamoArbiter
from dynamo_local.circus_plugins.client_host import CircusClientHost
from dynamo_local.system.process_host import LaunchSpec, ProcessHost
from tests.drivers.stock_circusd import StockCircusd

SLEEPS = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
AT_ONCE = 64
STOP_S = 2.0
EXIT_TIMEOUT_S = 10.0
NOTICED_TARGET_MS = 20.0
CODES_TARGET_PERCENT = 99.0
_IGNORES_TERM = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);time.sleep(600)"


@dataclass(slots=True)
class Hosted:
    """A host, the exits that it told of, and what was measured on it, by figure."""

    name: str
    host: ProcessHost
    folder: Path
    exits: asyncio.Queue[tuple[str, int, int | None, float]] = field(default_factory=asyncio.Queue)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def note(self, what: str, value: float) -> None:
        """One more sample."""
        self.samples.setdefault(what, []).append(value)

    async def start(self, name: str) -> int:
        """One sleeping process."""
        log_file = self.folder / f"{name}.log"
        return await self.host.start_process(LaunchSpec(name, SLEEPS, {}, "/", log_file, death_signal=signal.SIGKILL))

    async def kill(self, pid: int) -> int | None:
        """Kill it, and measure until its exit is told; its code as told."""
        killed_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        _, _, code, told_s = await asyncio.wait_for(self.exits.get(), EXIT_TIMEOUT_S)
        self.note("noticed", (told_s - killed_s) * 1000)
        return code


def run(short: bool) -> Report:
    """Times of starts and exits on both, and what somebody else's slow stop adds."""
    return asyncio.run(_run(short))


async def _run(short: bool) -> Report:
    report = Report("process_hosts")
    rounds, blocked = (10, 1) if short else (100, 3)
    async with AsyncExitStack() as stack:
        circusd = stack.enter_context(_circusd(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bc-")))))
        hosted = [
            await stack.enter_async_context(_own(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ba-"))))),
            await stack.enter_async_context(_stock(circusd)),
        ]
        codes: list[int | None] = []
        for n in range(rounds):
            for one in hosted:
                code = await _round(one, f"bench_{n}")
                if one.name == "stock circusd":
                    codes.append(code)
        for one in hosted:
            await _many(one)
        for n in range(blocked):
            await _blocked(hosted[1], circusd, f"blocked_{n}")
    for one in hosted:
        report.add(f"start of one process: {one.name}", "ms", one.samples["start"])
        report.add(f"start of {AT_ONCE} at once: {one.name}", "s", one.samples["many"])
        report.add(f"an exit is noticed: {one.name}", "ms", one.samples["noticed"], at_most(NOTICED_TARGET_MS))
    known = 100 * sum(code == -signal.SIGKILL for code in codes) / len(codes)
    report.add("exit codes known: stock circusd", "%", [known], at_least(CODES_TARGET_PERCENT))
    report.add(f"start during somebody's stop of {STOP_S:g} s: stock circusd", "s", hosted[1].samples["blocked"])
    report.notes.append("circusd's check_delay is 1 s; it is told by `add`, and each process comes for its ticket")
    return report


async def _round(one: Hosted, name: str) -> int | None:
    began_s = time.perf_counter()
    pid = await one.start(name)
    one.note("start", (time.perf_counter() - began_s) * 1000)
    code = await one.kill(pid)
    await one.host.forget(name)
    return code


async def _many(one: Hosted) -> None:
    names = [f"many_{n}" for n in range(AT_ONCE)]
    began_s = time.perf_counter()
    pids = await asyncio.gather(*(one.start(name) for name in names))
    one.note("many", time.perf_counter() - began_s)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in pids:
        await asyncio.wait_for(one.exits.get(), EXIT_TIMEOUT_S)
    await asyncio.gather(*(one.host.forget(name) for name in names))


async def _blocked(one: Hosted, circusd: StockCircusd, name: str) -> None:
    """Somebody stops a watcher that ignores SIGTERM until its `graceful_timeout`; meanwhile we start a process."""
    await asyncio.to_thread(circusd.ask, "start", name="stubborn", waiting=True)
    await asyncio.sleep(0.5)  # its Python installs its handler
    await asyncio.to_thread(circusd.ask, "stop", name="stubborn")
    began_s = time.perf_counter()
    pid = await one.start(name)
    one.note("blocked", time.perf_counter() - began_s)
    await one.kill(pid)
    await one.host.forget(name)


def _circusd(folder: Path) -> StockCircusd:
    stubborn = f'[watcher:stubborn]\ncmd = {sys.executable} -I -S -c "{_IGNORES_TERM}"\n'
    return StockCircusd(folder, f"{stubborn}graceful_timeout = {STOP_S}\nautostart = False\n")


def _tell_observers(one: Hosted) -> Hosted:
    one.host.on_exit = lambda name, pid, code: one.exits.put_nowait((name, pid, code, time.perf_counter()))
    return one


@asynccontextmanager
async def _own(folder: Path) -> AsyncIterator[Hosted]:
    arbiter = DynamoArbiter(endpoint=f"ipc://{folder}/ctl", pubsub_endpoint=f"ipc://{folder}/pub")
    await arbiter.start()
    yield _tell_observers(Hosted("own arbiter", arbiter, folder))
    await arbiter.close()


@asynccontextmanager
async def _stock(circusd: StockCircusd) -> AsyncIterator[Hosted]:
    host = CircusClientHost(circusd.endpoint, socket=circusd.folder / "run.sock", circusd_pid=circusd.pid)
    await host.start()
    yield _tell_observers(Hosted("stock circusd", host, circusd.folder))
    await host.close()
