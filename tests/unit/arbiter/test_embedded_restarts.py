"""An embedded server is started again for ever: without it no worker is found, and nobody else would start it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter import servers as embedded
from dynamo_local.arbiter.servers import (
    RAN_WELL_S,
    RESTART_DELAY_MAX_S,
    RESTART_DELAY_S,
    EmbeddedServers,
    EtcdSpec,
    ServerBinary,
)
from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.errors import EtcdUnavailable, InfraUnavailable, NatsUnavailable, StateError
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import ExitCallback, LaunchSpec

NAME = "test_etcd"
GONE = 2**22 + 1
"""Above every pid that Linux gives: it is gone when somebody asks."""


class Host:
    """Starts nothing. The next `refuses` starts fail; `starts` are their times."""

    def __init__(self) -> None:
        self.refuses = 0
        self.starts: list[float] = []
        self.on_exit: ExitCallback | None = None

    async def start_process(self, spec: LaunchSpec) -> int:
        """See `ProcessHost`."""
        self.starts.append(asyncio.get_running_loop().time())
        if self.refuses:
            self.refuses -= 1
            raise OSError("Cannot allocate memory")
        return GONE

    async def forget(self, name: str) -> None:
        """See `ProcessHost`."""


async def nothing() -> None:
    """Records no pid."""


class Bench:
    """An adopted etcd on that host; jitter is the largest there is where `unit` is 1."""

    def __init__(self, folder: Path, unit: float = 1.0) -> None:
        self.host = Host()
        paths = Paths("test", folder / "run", folder / "test.json", folder / "logs")
        self.log = paths.log_file(NAME)
        self.events: list[tuple[str, str | None]] = []
        self.recorder = nothing
        self.servers = EmbeddedServers(
            self.host,
            paths,
            AsyncioClock(),
            lambda name: {},
            on_change=lambda: self.recorder(),
            on_event=lambda event: self.events.append((event.event, event.reason)),
            unit=lambda: unit,
        )
        spec = EtcdSpec(ServerBinary("etcd", Path("/opt/etcd"), "PATH", None), folder / "etcd", 1, 2, None)
        self.servers.adopt(NAME, spec, GONE)

    @property
    def status(self) -> dict[str, Any]:
        """What `dynamo status --json` says of it."""
        (row,) = self.servers.status()
        return row

    def waits(self) -> list[float]:
        """Between the starts."""
        return [round(b - a, 6) for a, b in zip([0.0, *self.host.starts], self.host.starts, strict=False)]


def virtually(main: Callable[[Bench], Coroutine[Any, Any, None]], folder: Path, unit: float = 1.0) -> None:
    """Run it on a bench, in virtual time."""

    async def body() -> None:
        bench = Bench(folder, unit)
        await main(bench)
        await bench.servers.stop()

    run_virtual(body())


def test_a_failed_start_is_tried_again_until_it_works(tmp_path: Path) -> None:
    """It was given up after the first: no memory for a moment, and the graph had no registry for ever."""

    async def main(bench: Bench) -> None:
        bench.host.refuses = 20
        assert bench.servers.exited(NAME, -9)
        await asyncio.sleep(600)
        assert len(bench.host.starts) == 21
        assert bench.waits()[:4] == [RESTART_DELAY_S * 2**n for n in range(4)]
        assert max(bench.waits()) == RESTART_DELAY_MAX_S
        assert (bench.status["state"], bench.status["pid"]) == ("running", GONE)

    virtually(main, tmp_path)


def test_it_is_visible_while_it_is_down(tmp_path: Path) -> None:
    """State, failures, next try and the reason, for `dynamo status`."""

    async def main(bench: Bench) -> None:
        assert bench.status["state"] == "running"
        bench.host.refuses = 3
        bench.servers.exited(NAME, -9)
        assert bench.status == {
            "watcher_name": NAME,
            "kind": "etcd",
            "state": "restarting",
            "pid": None,
            "failures": 1,
            "next_try_s": RESTART_DELAY_S,
            "reason": "was killed by SIGKILL",
        }
        await asyncio.sleep(RESTART_DELAY_S + 0.1)
        assert (bench.status["failures"], bench.status["next_try_s"]) == (2, 0.3)
        assert bench.status["reason"] == "could not be started: Cannot allocate memory"
        await asyncio.sleep(10)
        assert (bench.status["state"], bench.status["failures"]) == ("running", 4)
        await asyncio.sleep(RAN_WELL_S)
        assert bench.status["failures"] == 0, "that was long ago"

    virtually(main, tmp_path)


def test_its_deaths_and_starts_are_events(tmp_path: Path) -> None:
    """For `dynamo events`; its end when all leave is none."""

    async def main(bench: Bench) -> None:
        bench.host.refuses = 1
        bench.servers.exited(NAME, -9)
        await asyncio.sleep(10)
        await bench.servers.stop()
        bench.servers.exited(NAME, 0)
        assert bench.events == [
            ("ServerDied", "was killed by SIGKILL"),
            ("ServerNotStarted", "could not be started: Cannot allocate memory"),
            ("ServerStarted", None),
        ]

    virtually(main, tmp_path)


def test_one_that_ran_well_begins_with_the_shortest_delay(tmp_path: Path) -> None:

    async def main(bench: Bench) -> None:
        bench.host.refuses = 4
        bench.servers.exited(NAME, 1)
        await asyncio.sleep(RAN_WELL_S * 3)
        bench.servers.exited(NAME, 1)
        assert bench.status["next_try_s"] == RESTART_DELAY_S

    virtually(main, tmp_path)


def test_one_that_exits_while_its_start_is_recorded_is_started_again(tmp_path: Path) -> None:

    async def main(bench: Bench) -> None:
        async def dies() -> None:
            bench.recorder = nothing
            await asyncio.sleep(0.01)
            bench.servers.exited(NAME, 1)

        bench.recorder = dies
        bench.servers.exited(NAME, 1)
        await asyncio.sleep(5)
        assert len(bench.host.starts) == 2
        assert bench.status["state"] == "running"

    virtually(main, tmp_path)


def test_one_whose_pid_could_not_be_recorded_runs_all_the_same(tmp_path: Path) -> None:
    """A full disk under the statefile is told of elsewhere; a second etcd on the same data would not help."""

    async def main(bench: Bench) -> None:
        async def full() -> None:
            raise StateError("no space left on device")

        bench.recorder = full
        bench.servers.exited(NAME, 1)
        await asyncio.sleep(60)
        assert len(bench.host.starts) == 1
        assert bench.status["state"] == "running"

    virtually(main, tmp_path)


@pytest.mark.parametrize(("unit", "share"), [(0.0, 0.5), (1.0, 1.0)])
def test_the_delay_is_drawn_from_the_upper_half(unit: float, share: float, tmp_path: Path) -> None:

    async def main(bench: Bench) -> None:
        bench.servers.exited(NAME, 1)
        assert bench.status["next_try_s"] == embedded.RESTART_DELAY_S * share

    virtually(main, tmp_path, unit)


def test_who_leaves_starts_nothing_again(tmp_path: Path) -> None:

    async def main(bench: Bench) -> None:
        bench.host.refuses = 100
        bench.servers.exited(NAME, 1)
        await asyncio.sleep(1)
        await bench.servers.stop()
        before = len(bench.host.starts)
        await asyncio.sleep(60)
        assert len(bench.host.starts) == before

    virtually(main, tmp_path)


def test_a_run_whose_server_keeps_dying_at_its_start_says_at_once_what_its_log_says(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        bench.log.parent.mkdir()
        bench.log.write_text("panic: write /run/etcd/member/wal: no space left on device\n")

        async def connecting() -> None:
            while True:
                bench.servers.exited(NAME, 2)
                await asyncio.sleep(5)

        with pytest.raises(InfraUnavailable, match="free some space") as raised:
            await bench.servers.while_starting(connecting())
        assert "exited with code 2 unasked (4 times)" in str(raised.value)
        assert "| panic: write /run/etcd/member/wal: no space left on device" in str(raised.value)
        assert asyncio.get_running_loop().time() < 30

    virtually(main, tmp_path)


@pytest.mark.parametrize("failure", [EtcdUnavailable("etcd did not answer"), NatsUnavailable("NATS did not answer")])
def test_only_the_log_of_the_server_that_does_not_answer_is_quoted(tmp_path: Path, failure: InfraUnavailable) -> None:
    async def main(bench: Bench) -> None:
        async def connecting() -> None:
            raise failure

        with pytest.raises(type(failure), match=str(failure)) as raised:
            await bench.servers.while_starting(connecting())
        assert ("the end of its log" in str(raised.value)) == isinstance(failure, EtcdUnavailable)

    virtually(main, tmp_path)
