"""Workers that die or leave while etcd is away or unwatched: the arbiter finds out, says why, and puts it right.

etcd is one of the test's own, so that it stays away for as long as the test says.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import busy, events, kinds, streaming
from tests.drivers.served import AGG, Served, auntil, expected, until
from tests.drivers.servers import RealEtcd, RealNats
from tests.integration.faults.conftest import ECHO

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

PATIENCE_S = 40.0
WORKERS = 6
TOKENS = 4000
"""A stream of so many outlasts the ten seconds in which a missing key may be written again: 6 ms each, 24 s."""

OTHER_LEASE = """\
from dynamo_local.sdk import async_on_start, endpoint, service
from dynamo_local.sdk.context import current_context


@service(name="Echo")
class Echo:
    @async_on_start
    async def start(self):
        context = current_context()
        lease = await context.kv.grant(600)
        await context.kv.put(f"others/{context.watcher_name}", b"requests are sent here", lease)
        await context.announce(leases=f"{lease:x}")

    @endpoint()
    async def generate(self, request: dict):
        yield request
"""


def _echo(etcd: RealEtcd, nats: RealNats, *words: str, namespace: str, source: str = ECHO) -> Served:
    return Served(
        *("--gpus", "sim:8", *words),
        target=("echo:Echo",),
        files={"echo.py": source},
        namespace=namespace,
        frontend=False,
        env={"ETCD_ENDPOINTS": etcd.endpoint, "NATS_SERVER": nats.address},
    )


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_workers_that_die_in_an_outage_of_etcd_come_back_spread_and_none_of_it_is_their_failure(
    own_etcd: RealEtcd, nats_server: RealNats
) -> None:
    """They came back within 0.25 s of each other, and loaded the disk that had just recovered all at once."""
    with _echo(own_etcd, nats_server, f"--Echo.ServiceArgs.workers={WORKERS}", namespace="spread").started() as served:
        first = served.pids()
        victims = list(first.values())
        for pid in victims[:2]:
            os.kill(pid, signal.SIGKILL)
        await own_etcd.kill()
        for pid in victims[2:]:
            os.kill(pid, signal.SIGKILL)
        await auntil(lambda: set(served.states().values()) == {"backing_off"}, PATIENCE_S, what=served.status)
        spawned_before = len(_spawned(served))
        await own_etcd.start()
        await auntil(lambda: set(served.states().values()) == {"ready"}, PATIENCE_S, what=served.status)
        times = sorted(record["time"] for record in _spawned(served)[spawned_before:])
        entries = served.statefile()["components"].values()
        assert len(times) == WORKERS
        assert times[-1] - times[0] > 0.75, times
        assert not set(served.pids().values()) & set(victims)
        assert [(e.get("failures_s"), e.get("failures_streak")) for e in entries] == [(None, None)] * WORKERS
        assert "Faulted" not in kinds(events(served))


def _spawned(served: Served) -> list[dict[str, object]]:
    return [record for record in events(served) if record["event"] == "Spawned"]


@pytest.mark.full
async def test_a_lease_that_is_revoked_while_etcd_cannot_be_watched_is_no_ready_workers_lease(
    own_etcd: RealEtcd, nats_server: RealNats
) -> None:
    """The worker stayed `ready` with a dead lease, and its end was a crash."""
    env = {"ETCD_ENDPOINTS": own_etcd.endpoint, "NATS_SERVER": nats_server.address}
    with Served("--VllmWorker.ServiceArgs.workers=2", target=AGG, namespace="unseen", env=env).started() as served:
        async with streaming(served, "Let me finish.", tokens=TOKENS) as (stream,):
            name = await auntil(lambda: busy(served, "VllmWorker"), what=served.status)
            row, arbiter = served.worker(name), served.status()["arbiter_pid"]
            with _stopped(arbiter):
                served.etcdctl("lease", "revoke", row["lease"])
                await auntil(lambda: row["lease"] not in " ".join(served.keys()), what=served.keys)
                await own_etcd.restart()
            await auntil(lambda: served.states()[name] == "draining", PATIENCE_S, what=served.status)
            told = served.worker(name)
            assert not stream.done(), "it was to outlast all of this"
            assert await stream == expected("Let me finish.", TOKENS, ignore_eos=True)
        await auntil(lambda: not is_alive(row["pid"]))
        await auntil(lambda: kinds(events(served, name))[-1] == "ProcessExited", PATIENCE_S, what=served.status)
        assert told["lease"] is None
        assert "revoked" in told["reason"]
        assert kinds(events(served, name))[-2:] == ["LeaseRevoked", "ProcessExited"]


@pytest.mark.parametrize(
    "watch_breaks",
    [pytest.param(False, marks=pytest.mark.full, id="watch_lives"), pytest.param(True, id="watch_breaks")],
)
async def test_a_worker_that_left_by_its_lease_while_nobody_watched_has_not_crashed(
    own_etcd: RealEtcd, nats_server: RealNats, watch_breaks: bool
) -> None:
    """The arbiter hears of the exit before the end of the key, because signals are quicker."""
    with _echo(own_etcd, nats_server, "--Echo.ServiceArgs.workers=2", namespace="left").started() as served:
        row, arbiter = served.worker("Echo_1"), served.status()["arbiter_pid"]
        with _stopped(arbiter):
            served.etcdctl("lease", "revoke", row["lease"])
            await auntil(lambda: psutil.Process(row["pid"]).status() == psutil.STATUS_ZOMBIE)
            if watch_breaks:
                await own_etcd.restart()
        await auntil(lambda: kinds(events(served, "Echo_1"))[-1] == "ProcessExited", PATIENCE_S, what=served.status)
        await auntil(lambda: "Echo_1" not in served.states(), PATIENCE_S, what=served.status)
        assert kinds(events(served, "Echo_1"))[-2:] == ["LeaseRevoked", "ProcessExited"]
        assert served.states() == {"Echo": "ready"}


@pytest.mark.full
def test_an_adoption_knows_the_leases_of_what_is_behind_a_worker(own_etcd: RealEtcd, nats_server: RealNats) -> None:
    """They were forgotten, and dead backends stayed in routing until their leases expired."""
    words = ("--Echo.ServiceArgs.workers=2", "--on-arbiter-death", "keep")
    with _echo(own_etcd, nats_server, *words, namespace="adopted", source=OTHER_LEASE).started() as served:
        pids, first = served.pids(), _other_leases(served)
        assert len(_leases(served) & set(first.values())) == 2
        served.kill_arbiter(guardian=True)
        os.kill(pids["Echo_1"], signal.SIGKILL)
        until(lambda: not is_alive(pids["Echo_1"]))
        assert set(first.values()) <= _leases(served), "nobody was there to revoke them"
        served.adopt()
        until(lambda: served.states() == {"Echo": "ready", "Echo_1": "ready"}, PATIENCE_S, what=served.status)
        adopted = _other_leases(served)
        assert first["Echo_1"] not in _leases(served), "of a worker that ended while nobody watched"
        assert adopted["Echo"] == first["Echo"]
        os.kill(pids["Echo"], signal.SIGKILL)
        until(lambda: first["Echo"] not in _leases(served), PATIENCE_S, what=served.status)
        until(lambda: served.states() == {"Echo": "ready", "Echo_1": "ready"}, PATIENCE_S, what=served.status)
        assert adopted["Echo_1"] in _leases(served), "of a worker that nothing has happened to"


def _other_leases(served: Served) -> dict[str, str]:
    """The one of each worker, by its name without the namespace, from the statefile; hex."""
    entries = served.statefile()["components"].items()
    return {name.removeprefix("adopted_"): entry["other_leases"][0] for name, entry in entries}


def _leases(served: Served) -> set[str]:
    """Ids of all leases in etcd, hex without leading zeros, which etcdctl prints."""
    return {f"{int(lease, 16):x}" for lease in served.etcdctl("lease", "list").split()[3:]}
