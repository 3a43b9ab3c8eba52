"""A worker's load: when it is published, on a NATS that only records, and how it is sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.core.types import Load, Missing
from dynamo_local.transport.load import STALE_AFTER_S, LoadPublisher, LoadSampler, LoadView, load_subject
from tests.fakes.infra.memory_nats import LATENCY_S, MemoryNats


class ManualClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self.time_s

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.time_s

    async def sleep_until(self, deadline_s: float) -> None:
        if deadline_s > self.time_s:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sleepers.append((deadline_s, future))
            await future
        await asyncio.sleep(0)

    async def move_to(self, time_s: float) -> None:
        """In small steps, so that everybody who sleeps in between wakes at their time."""
        await settle()
        while self.time_s < time_s:
            self.time_s = min(time_s, round(self.time_s + 0.01, 6))
            for deadline_s, future in self._sleepers:
                if deadline_s <= self.time_s and not future.done():
                    future.set_result(None)
            self._sleepers = [(d, f) for d, f in self._sleepers if not f.done()]
            await settle()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


class RecordingNats:
    """`publish` and `subscribe` of a NATS client."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.is_connected = True
        self.is_closed = False
        self.published: list[tuple[float, str, dict[str, Any]]] = []
        self.callbacks: dict[str, Callable[[Any], Awaitable[None]]] = {}

    async def publish(self, subject: str, data: bytes) -> None:
        self.published.append((round(self.clock.now_s(), 3), subject, json.loads(data)))

    async def subscribe(self, subject: str, cb: Callable[[Any], Awaitable[None]]) -> Any:
        self.callbacks[subject] = cb

        async def unsubscribe() -> None:
            del self.callbacks[subject]

        return SimpleNamespace(unsubscribe=unsubscribe)

    async def flush(self, timeout: int) -> None:
        """Nothing is buffered."""

    def times(self) -> list[float]:
        return [time_s for time_s, _, _ in self.published]


class Worker:
    """A load and the signal that it changed."""

    def __init__(self) -> None:
        self.load = Load(request_total_slots=8)
        self.fails: Exception | None = None
        self.changed_fails: Exception | None = None
        self._changed = asyncio.Event()

    def source(self) -> Load:
        if self.fails is not None:
            raise self.fails
        return self.load

    async def changed(self) -> None:
        if self.changed_fails is not None:
            raise self.changed_fails
        await self._changed.wait()

    def change(self, active: int) -> None:
        self.load = Load(request_active_slots=active, request_total_slots=8)
        self._changed.set()
        self._changed = asyncio.Event()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def nats(clock: ManualClock) -> RecordingNats:
    return RecordingNats(clock)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def publisher_of(
    worker: Worker, nats: RecordingNats, clock: ManualClock, component: str, instance_id: int
) -> LoadPublisher:
    return LoadPublisher(
        nats,
        "ns",
        component,
        f"ns_{component}",
        lambda: instance_id,
        worker.source,
        worker.changed,
        clock,  # type: ignore[arg-type]
    )


@pytest.fixture
async def publisher(nats: RecordingNats, clock: ManualClock, worker: Worker) -> AsyncIterator[LoadPublisher]:
    made = publisher_of(worker, nats, clock, "VllmWorker", 0xABC)
    await made.start()
    yield made
    await made.close()
    assert nats.callbacks == {}


@pytest.mark.usefixtures("publisher")
async def test_the_load_is_published_once_a_second(nats: RecordingNats, clock: ManualClock) -> None:
    """First at once, then each second, on the component's subject, with who measured it and when."""
    await clock.move_to(3.5)
    assert nats.times() == [0.0, 1.0, 2.0, 3.0]
    _, subject, message = nats.published[1]
    assert subject == "ns.load.VllmWorker"
    assert (message["watcher_name"], message["component"], message["instance_id"]) == (
        "ns_VllmWorker",
        "VllmWorker",
        0xABC,
    )
    assert message["published_at_s"] == pytest.approx(1_700_000_001.0)
    assert message["load"]["request_total_slots"] == 8


@pytest.mark.usefixtures("publisher")
async def test_a_change_is_published_soon(nats: RecordingNats, clock: ManualClock, worker: Worker) -> None:
    await clock.move_to(0.5)
    worker.change(active=3)
    await clock.move_to(0.52)
    assert nats.times() == [0.0, 0.5]
    assert nats.published[-1][2]["load"]["request_active_slots"] == 3


@pytest.mark.usefixtures("publisher")
async def test_many_changes_are_published_every_100_ms(nats: RecordingNats, clock: ManualClock, worker: Worker) -> None:
    for i in range(1, 51):
        await clock.move_to(i * 0.01)
        worker.change(active=i)
    await clock.move_to(0.9)
    times = nats.times()
    assert all(later - earlier >= 0.099 for earlier, later in itertools.pairwise(times))
    assert 5 <= len(times) <= 7
    assert nats.published[-1][2]["load"]["request_active_slots"] == 50


@pytest.mark.usefixtures("publisher")
async def test_nothing_is_buffered_while_nats_is_away(nats: RecordingNats, clock: ManualClock) -> None:
    await clock.move_to(0.5)
    nats.is_connected = False
    await clock.move_to(5.5)
    assert nats.times() == [0.0]
    nats.is_connected = True
    await clock.move_to(6.5)
    assert nats.times() == [0.0, 6.0]


@pytest.mark.usefixtures("publisher")
async def test_a_failing_source_is_missing_not_zero(
    nats: RecordingNats, clock: ManualClock, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.fails = RuntimeError("engine is loading")
    await clock.move_to(0.5)
    before = len(nats.published)
    await clock.move_to(3.5)
    await nats.callbacks["ns.load"](SimpleNamespace(reply="inbox"))
    assert len(nats.published) == before
    assert caplog.text.count("will be missing (said once)") == 1
    worker.fails = None
    await clock.move_to(4.5)
    assert len(nats.published) == before + 1


async def test_counters_go_to_those_who_ask_alone(nats: RecordingNats, clock: ManualClock) -> None:
    """Pickers hear a load ten times a second and have no use for them; strangers' ones are not believed."""
    worker = Worker()
    publisher = LoadPublisher(
        nats,
        "ns",
        "W",
        "ns_W",
        lambda: 7,
        worker.source,
        worker.changed,
        clock,  # type: ignore[arg-type]
        dispatch=lambda: {"refused": 2.0},
        served=lambda: {"requests": 1.0, "ttft.57": 1.0},
    )
    await publisher.start()
    await settle()
    assert (nats.published[-1][2]["dispatch"], nats.published[-1][2]["served"]) == (None, None)
    await nats.callbacks["ns.load"](SimpleNamespace(reply="inbox"))
    await publisher.close()
    message = nats.published[-1][2]
    view = LoadView(nats, "ns", "W", clock)  # type: ignore[arg-type]
    await view.start()
    assert message["served"] == {"requests": 1.0, "ttft.57": 1.0}
    for told, believed in (
        ({"dispatch": {"refused": 2.0}}, True),
        ({"dispatch": {"Rm -rf": 1.0}}, False),
        ({"dispatch": {"a" * n: 0 for n in range(70)}}, False),
        ({"served": {"ttft.57": 1}}, True),
        ({"served": {"ttft.57": -1}}, False),
        ({"served": {"ttft.x": 1}}, False),
        ({"served": {f"ttft.{n}": 1 for n in range(600)}}, False),
    ):
        view.forget(7)
        data = json.dumps({**message, **told}).encode()
        await nats.callbacks["ns.load.W"](SimpleNamespace(data=data, subject="s"))
        assert isinstance(view.get(7), Missing) is not believed
    await view.close()


async def test_a_broken_change_signal_leaves_one_load_a_second(
    nats: RecordingNats, clock: ManualClock, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.changed_fails = RuntimeError("no signal")
    publisher = publisher_of(worker, nats, clock, "W", 1)
    await publisher.start()
    await clock.move_to(2.5)
    assert nats.times() == [0.0, 1.0, 2.0]
    assert "change signal of ns_W failed" in caplog.text
    await publisher.close()


async def test_a_view_forgets_and_grows_old(nats: RecordingNats, clock: ManualClock) -> None:
    worker = Worker()
    publisher = publisher_of(worker, nats, clock, "W", 7)
    view = LoadView(nats, "ns", "W", clock)  # type: ignore[arg-type]
    await view.start()
    assert view.get(7) == Missing("instance 7 has published no load yet")
    await publisher.start()
    await settle()
    await nats.callbacks["ns.load.W"](SimpleNamespace(data=json.dumps(nats.published[-1][2]).encode(), subject="s"))
    await publisher.close()
    await clock.move_to(3.0)
    report = view.get(7)
    assert not isinstance(report, Missing)
    assert (report.load, report.watcher_name, report.age_s) == (worker.load, "ns_W", pytest.approx(3.0))
    assert set(view.loads()) == {7}
    await clock.move_to(3.1)
    assert view.get(7) == Missing("the last load of instance 7 is 3.1 s old")
    assert view.loads() == {}
    view.forget(7)
    assert view.get(7) == Missing("instance 7 has published no load yet")
    await view.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["load"].pop("kv_total_blocks"),
        lambda m: m["load"].update(num_requests_waiting="many"),
        lambda m: m.pop("instance_id"),
        lambda m: m.clear(),
    ],
)
async def test_a_view_takes_no_incomplete_load(
    nats: RecordingNats, clock: ManualClock, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], None]
) -> None:
    worker = Worker()
    publisher = publisher_of(worker, nats, clock, "W", 7)
    view = LoadView(nats, "ns", "W", clock)  # type: ignore[arg-type]
    await view.start()
    await publisher.start()
    await settle()
    await publisher.close()
    message = nats.published[-1][2]
    change(message)
    for _ in range(3):
        await nats.callbacks["ns.load.W"](SimpleNamespace(data=json.dumps(message).encode(), subject="ns.load.W"))
    assert isinstance(view.get(7), Missing)
    assert caplog.text.count("something that is no load came on ns.load.W") == 1
    await view.close()


# --- load sampler
# Tests who answers late lives: on a starved host all answers may take longer than a question is waited for.

NAMESPACE = "dynamo"
QUESTION_S = 0.25
SOON_S = 2 * LATENCY_S


class OneClock(AsyncioClock):
    """People's time and the loop's are one."""

    def wall_s(self) -> float:
        return self.now_s()


class Asked:
    """Workers that keep the questions, and answer when they are told to; and who asks them."""

    def __init__(self) -> None:
        server = MemoryNats()
        self._workers, self.clock = server.client(), OneClock()
        nats: Any = server.client()
        self.sampler = LoadSampler(nats, NAMESPACE, self.clock)
        self.questions: list[str] = []

    async def start(self) -> None:
        """They listen, and were asked once, in vain."""

        async def keep(message: Any) -> None:
            self.questions.append(message.reply)

        await self._workers.subscribe(load_subject(NAMESPACE), cb=keep)
        assert await self.sample() == {}
        assert len(self.questions) == 1

    async def sample(self) -> dict[str, tuple[int, float]]:
        reports = await self.sampler.sample(QUESTION_S, expected=2)
        return {name: (report.load.request_active_slots, report.age_s) for name, report in reports.items()}

    async def answer(self, question: int, watcher: str, *, active: int = 0, age_s: float = 0.0) -> None:
        said = {"watcher_name": watcher, "component": "Frontend", "instance_id": 1}
        load = Load(request_active_slots=active).numbers()
        data = msgspec.json.encode({**said, "load": load, "published_at_s": self.clock.wall_s() - age_s})
        await self._workers.publish(self.questions[question], data)
        await asyncio.sleep(SOON_S)


def virtually(test: Callable[[Asked], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        asked = Asked()
        await asked.start()
        await test(asked)

    def run() -> None:
        run_virtual(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtually
async def test_an_answer_after_its_time_is_part_of_the_next_sample(asked: Asked) -> None:
    await asked.answer(0, "a", active=3, age_s=0.5)
    await asyncio.sleep(0.1)
    assert await asked.sample() == {"a": (3, pytest.approx(0.5 + SOON_S + 0.1 + QUESTION_S))}


@virtually
async def test_an_answer_counts_once(asked: Asked) -> None:
    """Who has answered nothing since is silent."""
    await asked.answer(0, "a")
    assert list(await asked.sample()) == ["a"]
    assert await asked.sample() == {}


@virtually
async def test_a_late_answer_does_not_end_the_wait_for_those_of_now(asked: Asked) -> None:
    for name in "ab":
        await asked.answer(0, name, active=1)
    asking = asyncio.create_task(asked.sample())
    await asyncio.sleep(SOON_S)
    await asked.answer(1, "a", active=2)
    assert not asking.done()
    await asked.answer(1, "b", active=2)
    assert {name: active for name, (active, _) in (await asking).items()} == {"a": 2, "b": 2}


@virtually
async def test_an_answer_that_is_too_old_says_nothing_of_now(asked: Asked) -> None:
    await asked.answer(0, "a", age_s=STALE_AFTER_S)
    assert await asked.sample() == {}
