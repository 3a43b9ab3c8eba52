"""A worker's registration beside its drain, on the fake etcd: a lease that goes is an order once, not twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_local.components.measurement import MEASURE, MeasureRequest
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.core.types import WorkerState
from dynamo_local.sdk.context import current_context
from dynamo_local.state.schema import ComponentEntry, State
from dynamo_local.state.store import StateStore
from dynamo_local.worker import process as worker_entry
from dynamo_local.worker import registration as endpoints
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.process import Entry, EntryWriter
from dynamo_local.worker.registration import Endpoints, Registration
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.worker.identities import identity_of

READY_KEYS = "dynamo/workers/"
SOON_S = 5.0
TURNS = range(0, 24, 3)
"""So many turns of the event loop between two things: a revoke is noticed, and acted on, within some twenty."""


class Worker:
    """A drain and a registration, joined as the worker process joins them. It has something to finish, for ever."""

    def __init__(self, etcd: FakeEtcd) -> None:
        identity = identity_of("PrefillWorker")
        self.etcd = etcd
        self.drain = Drain(self)
        self.registration = Registration(
            identity,
            Endpoints(identity),
            facts=dict,
            on_change=lambda *, resumed=None: None,
            on_revoked=lambda: self.drain.begin("its lease was revoked"),
            serves=lambda: self.drain.phase is Phase.READY,
        )

    async def start(self) -> None:
        await self.registration.take_lease(self.etcd, self._is_draining)
        await self.registration.register_ready(lambda: asyncio.sleep(0))
        assert self.drain.started()

    async def close(self) -> None:
        await self.drain.close()
        await self.registration.close()

    async def keys(self) -> list[str]:
        return [kv.key for kv in (await self.etcd.get_prefix(READY_KEYS))[0]]

    async def _is_draining(self) -> bool:
        return self.drain.phase in (Phase.DRAINING, Phase.LEAVING)

    def unfollow_lease(self) -> None:
        self.registration.unfollow()

    async def end_standby(self) -> None: ...

    def stop_accepting(self, linger_s: float) -> None: ...

    async def deregister(self) -> None:
        await self.registration.deregister()

    async def finish(self) -> None:
        await asyncio.Event().wait()

    async def resume(self) -> None:
        await self.registration.restore()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(FakeEtcd())
    await made.start()
    yield made
    await made.close()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("before_sign", TURNS)
@pytest.mark.parametrize("before_cancel", TURNS)
@pytest.mark.parametrize("how", ["etcd loses its data", "the lease is revoked"])
async def test_a_drain_is_taken_back_though_its_lease_goes_meanwhile(
    worker: Worker, how: str, before_sign: int, before_cancel: int
) -> None:
    """seed 989012058: the worker was told to drain (SIGTERM) as its lease was lost, and called back at once. That the
    old lease was gone was noticed while it came back, was taken for a later order, and it left after the answer."""
    if how == "the lease is revoked":
        assert worker.registration.lease is not None
        await worker.etcd.revoke(worker.registration.lease.lease_id)
    else:
        worker.etcd.restart(lose_data=True)
    await turns(before_sign)
    worker.drain.begin("SIGTERM")
    await turns(before_cancel)
    await worker.drain.cancel()
    await turns(50)
    assert (worker.drain.phase, len(await worker.keys())) == (Phase.READY, 1)
    assert worker.registration.held_lease() in (await worker.keys())[0]


async def test_the_lease_that_it_has_after_that_is_followed(worker: Worker) -> None:
    worker.drain.begin("SIGTERM")
    await worker.drain.cancel()
    assert worker.registration.lease is not None
    await worker.etcd.revoke(worker.registration.lease.lease_id)
    async with asyncio.timeout(SOON_S):
        while worker.drain.phase is Phase.READY:
            await asyncio.sleep(0.005)
    assert (worker.drain.phase, worker.drain.reason) == (Phase.DRAINING, "its lease was revoked")


# --- worker entry writer
# The worker's part of its statefile entry.

NAME = "dynamo_W"
READY = Entry(pid=7, lease="ab", endpoints=("dynamo/components/W/e:ab",), draining=None, frontend_url=None)
DRAINING = replace(READY, lease=None, endpoints=(), draining="asked")


class Bench:
    """A statefile and a worker whose truth the test says."""

    def __init__(self, path: Path) -> None:
        self.store = StateStore(path, run_id="run")
        self.truth = READY
        self.commits = 0
        entry = ComponentEntry(watcher_name=NAME, component="W", state=WorkerState.READY)
        self.store.create(State(namespace="dynamo", run_id="run", components={NAME: entry}))
        self.writer = EntryWriter(self.store, NAME, self.tell)

    def tell(self) -> Entry:
        self.commits += 1
        return self.truth

    @property
    def entry(self) -> ComponentEntry:
        return self.store.read().components[NAME]

    def arbiter_says(self, state: WorkerState) -> None:
        with self.store.transaction() as found:
            found.components[NAME].state = state

    async def written(self, truth: Entry, *, resumed: bool | None = None) -> ComponentEntry:
        self.truth = truth
        self.writer.touch(resumed=resumed)
        assert await self.writer.flush(5)
        return self.entry


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A ready worker, as the arbiter sees it."""
    monkeypatch.setattr(worker_entry, "RETRY_S", 0.02)
    made = Bench(tmp_path / "dynamo.json")
    yield made
    await made.writer.close()


async def test_lease_and_endpoints_are_written_together(bench: Bench) -> None:
    """Also from one lease to the next: an endpoint under another lease would be refused."""
    entry = await bench.written(READY)
    assert (entry.pid, entry.lease, entry.endpoints) == (7, "ab", ["dynamo/components/W/e:ab"])
    entry = await bench.written(replace(READY, lease="cd", endpoints=("dynamo/components/W/e:cd",)))
    assert (entry.lease, entry.endpoints) == ("cd", ["dynamo/components/W/e:cd"])


async def test_a_drain_that_nobody_committed_is_written_with_its_reason(bench: Bench) -> None:
    entry = await bench.written(DRAINING)
    assert (entry.state, entry.reason, entry.lease, entry.endpoints) == (WorkerState.DRAINING, "asked", None, [])
    entry = await bench.written(READY, resumed=True)
    assert (entry.state, entry.reason, entry.lease) == (WorkerState.READY, None, "ab")


@pytest.mark.parametrize("state", [WorkerState.DRAIN_TIMED_OUT, WorkerState.CRASHED, WorkerState.PENDING])
async def test_what_only_the_arbiter_knows_is_left_alone(bench: Bench, state: WorkerState) -> None:
    bench.arbiter_says(state)
    assert (await bench.written(DRAINING)).state is state
    assert (await bench.written(READY, resumed=True)).state is state


async def test_a_committed_drain_that_the_worker_has_not_heard_of_stays(bench: Bench) -> None:
    """The arbiter commits first: a change of ours in between, also after an earlier resume, must not undo it."""
    await bench.written(DRAINING)
    await bench.written(READY, resumed=True)
    bench.arbiter_says(WorkerState.DRAINING)
    assert (await bench.written(replace(READY, lease="ef", endpoints=()))).state is WorkerState.DRAINING


async def test_many_changes_need_few_commits(bench: Bench) -> None:
    for n in range(100):
        bench.truth = replace(READY, lease=f"{n + 1:x}", endpoints=())
        bench.writer.touch()
    assert await bench.writer.flush(5)
    assert (bench.entry.lease, bench.commits <= 3) == ("64", True)


async def test_a_broken_file_is_made_up_for_once_it_is_repaired(bench: Bench) -> None:
    """Nothing is lost but time, and a resume is not forgotten."""
    await bench.written(DRAINING)
    good = bench.store.path.read_text()
    bench.store.path.write_text("{")
    bench.truth = READY
    bench.writer.touch(resumed=True)
    assert not await bench.writer.flush(0.1)
    bench.store.path.write_text(good)
    assert await bench.writer.flush(5)
    assert (bench.entry.state, bench.entry.lease) == (WorkerState.READY, "ab")


async def test_an_entry_that_is_gone_is_not_made_again(bench: Bench) -> None:
    with bench.store.transaction() as state:
        del state.components[NAME]
    bench.writer.touch()
    assert await bench.writer.flush(5)
    assert bench.store.read().components == {}


async def test_the_frontends_url_is_the_namespaces(bench: Bench) -> None:
    await bench.written(replace(READY, frontend_url="http://127.0.0.1:1"))
    assert bench.store.read().frontend_url == "http://127.0.0.1:1"


async def test_whether_the_file_says_draining(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert not await bench.writer.drains()
    bench.arbiter_says(WorkerState.DRAINING)
    assert await bench.writer.drains()
    await asyncio.to_thread(bench.store.path.write_text, "{")
    assert not await bench.writer.drains()
    assert "cannot tell" in caplog.text


# --- more endpoints
# A component serves endpoints that its class does not declare, each with the model of its own requests.


class _Server:
    """Shows what an `EndpointServer` is made with."""

    def __init__(self, nats: Any, *, subject: str, handler: Any, name: str, decode: Any) -> None:
        self.name, self.subject, self.handler, self.decode = name, subject, handler, decode

    async def start(self) -> None:
        """Nothing listens."""

    async def close(self) -> None:
        """Nothing did."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[_Server]:
    """Those that are made, in order."""
    made: list[_Server] = []

    def make(nats: Any, **options: Any) -> _Server:
        made.append(_Server(nats, **options))
        return made[-1]

    monkeypatch.setattr(endpoints, "EndpointServer", make)
    return made


async def test_an_added_endpoint_is_registered_and_reads_its_own_requests(servers):
    """As `measure` of a worker that can be measured; the declared ones keep theirs, and so does the load."""
    more = {MEASURE: (lambda request: request, MeasureRequest)}
    context: Any = SimpleNamespace(
        nats=None, lease_id=5, load_source=object(), more_endpoints=more, close_with_worker=lambda close: None
    )
    component = SimpleNamespace(status=None, canary=None)
    identity: Any = SimpleNamespace(namespace="dynamo", component="PrefillWorker")
    served = endpoints.Endpoints(identity)
    await served.serve(context, PrefillWorker, component, lambda: None)  # type: ignore[arg-type]
    assert [key.rpartition("/")[2] for key in served.keys(5)] == ["status:5", "canary:5", "load_metrics:5", "measure:5"]
    by_name = {server.name: server for server in servers}
    asked = MeasureRequest(prompts=1, tokens=10, seed=3)
    assert by_name[MEASURE].decode(msgspec.msgpack.encode(asked)) == asked
    assert by_name["load_metrics"].decode(b"whatever") is None


async def test_a_colocated_component_is_served_on_nats_and_registered_under_its_hosts_lease(servers):
    context: Any = SimpleNamespace(nats=None, lease_id=5, close_with_worker=lambda close: None)
    component = SimpleNamespace(status=lambda request: current_context(), canary=None)
    host: Any = SimpleNamespace(namespace="dynamo", component="Frontend")
    served = endpoints.Endpoints(host)
    await served.serve_colocated(context, PrefillWorker, component)  # type: ignore[arg-type]
    assert served.keys(5) == ["dynamo/components/PrefillWorker/status:5", "dynamo/components/PrefillWorker/canary:5"]
    [key, value] = served.registrations()[0]
    assert key(6) == "dynamo/components/PrefillWorker/status:6"
    assert b"PrefillWorker" in value(6)
    assert servers[0].handler(None, None) is context, "its code runs in its own context, not in its host's"
