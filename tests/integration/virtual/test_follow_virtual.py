"""`dynamo serve --follow virtual` on real processes, driven by a planner that was written from the protocol alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT
from dynamo_local.transport.etcd import EtcdStore
from tests.drivers.scaled import events, load, names, settled
from tests.drivers.served import Served, auntil
from tests.drivers.servers import RealEtcd
from tests.fakes.planner.virtual import ForeignPlanner
from tests.tools.alone import alone

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

P, D = "PrefillWorker", "VllmWorker"
NOT_YET_S = 1.0
"""How long a thing that must not happen is waited for."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    """This module's own etcd, free to be killed."""
    with RealEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="module")
def shared(etcd: RealEtcd) -> Iterator[Served]:
    with Served("--follow", "virtual", env={"ETCD_ENDPOINTS": etcd.endpoint}) as served:
        yield served.start()


@pytest.fixture
async def store(etcd: RealEtcd) -> AsyncIterator[EtcdStore]:
    found = await EtcdStore.connect_when_up(etcd.endpoint, 10.0)
    yield found
    await found.close()


@pytest.fixture
async def planner(shared: Served, store: EtcdStore) -> AsyncIterator[ForeignPlanner]:
    """It goes on counting where the test before left off, and leaves one worker of each role."""
    planner = ForeignPlanner(store)
    planner.decision_id = await planner.get("decision_id")
    yield planner
    await planner.acknowledged(await planner.decide(prefill=1, decode=1))
    await settled(shared)


def ready(served: Served) -> tuple[int, int]:
    return len(names(served, P)), len(names(served, D))


def follow(served: Served) -> dict:
    found: dict = served.status()["follow"]
    return found


async def phase(served: Served, wanted: str, decision_id: int) -> dict:
    await auntil(
        lambda: (follow(served)["phase"], follow(served)["decision_id"]) == (wanted, decision_id),
        what=lambda: follow(served),
    )
    return follow(served)


async def test_one_three_one_under_load_is_acknowledged_when_it_is_so_and_loses_nothing(
    shared: Served, planner: ForeignPlanner
) -> None:
    async with load(shared) as streams:
        up = await planner.decide(prefill=1, decode=3)
        await planner.acknowledged(up)
        assert ready(shared) == (1, 3)
        await streams.more(10)
        down = await planner.decide(prefill=1, decode=1)
        await planner.acknowledged(down)
        assert ready(shared) == (1, 1)
        await streams.more(10)
    streams.check()
    status = follow(shared)
    assert (status["phase"], status["scaled_decision_id"], status["reason"]) == ("done", down, None)
    causes = {record["stimulus_id"] for record in events(shared) if record["component"] == D}
    assert {f"virtual:{up}", f"virtual:{down}"} <= causes
    phases = [(record["stimulus_id"], record["to"]) for record in events(shared, "follow")]
    assert phases[-4:] == [(f"virtual:{n}", to) for n in (up, down) for to in ("under_way", "done")]


async def test_without_gpus_it_is_not_acknowledged_and_everybody_is_told_why(
    shared: Served, planner: ForeignPlanner
) -> None:
    number = await planner.decide(prefill=1, decode=9)
    status = await phase(shared, "refused", number)
    assert status["reason"].startswith("VllmWorker=9: ")
    assert "GPU" in status["reason"]
    with pytest.raises(TimeoutError):
        await planner.acknowledged(number, NOT_YET_S)
    assert ready(shared) == (1, 1)
    shown = shared.cli("status").stdout
    assert f"follow    virtual (v1/dynamo/planner/): decision {number} (prefill=1, decode=9) cannot be carried" in shown
    assert f"decision {number}" in shared.cli("planner", "status").stdout
    told = shared.cli("events", "--worker", "follow", "-l", "1").stdout
    assert f"-> refused (PlannerDecision by virtual:{number}: VllmWorker=9: " in told


async def test_it_survives_a_restart_of_etcd(shared: Served, planner: ForeignPlanner, etcd: RealEtcd) -> None:
    before = shared.pids()
    etcd.stop_now()
    await auntil(lambda: "etcd does not answer" in (follow(shared)["reason"] or ""), what=lambda: follow(shared))
    etcd.start_now()
    await auntil(lambda: follow(shared)["reason"] is None, what=lambda: follow(shared))
    await planner.acknowledged(await planner.decide(prefill=1, decode=2))
    assert ready(shared) == (1, 2)
    assert before.items() <= shared.pids().items()


async def test_a_planner_here_is_refused_while_it_follows_another(shared: Served, planner: ForeignPlanner) -> None:
    done = shared.cli("planner", "start")
    assert done.returncode == 1
    assert "carries out another planner's decisions (--follow)" in done.stderr
    assert shared.status()["planner"]["state"] == "stopped"


@pytest.mark.full
async def test_an_adopted_run_goes_on_following() -> None:
    with alone("--on-arbiter-death", "keep") as served:
        served.ok(*served.serve_words("--follow", "virtual", "--detach"), timeout_s=90.0)
        store = await served.etcd()
        planner = ForeignPlanner(store)
        await planner.acknowledged(await planner.decide(decode=2))
        before = served.pids()
        served.kill_arbiter()
        number = await planner.decide(decode=3)
        served.adopt()
        await planner.acknowledged(number)
        assert before.items() <= served.pids().items()
        assert served.statefile()["follow"] == {"environment": "virtual", "keys": "v1"}
        served.kill_arbiter()
        served.adopt("--planner")
        assert (served.status()["follow"], served.status()["planner"]["state"]) == (None, "running")
        assert "follow" not in served.statefile()
        await store.close()


def test_what_cannot_be_followed_is_refused_before_anything_starts() -> None:
    with alone("--follow", "virtual", "--planner") as served:
        done = served.cli(*served.serve_words("--detach"))
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    assert "--follow virtual carries out another planner's decisions" in done.stderr
