"""A worker's phases: every order, every moment, with steps that the test holds in its hand."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.errors import DrainNotCancellable, EtcdUnavailable
from dynamo_local.worker import drain as worker_drain
from dynamo_local.worker.drain import LINGER_S, Drain, Phase


class HandSteps:
    """Records what is done; each step waits for its gate."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.deregistering, self.finishing, self.resuming = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.deregistering.set()
        self.resuming.set()
        self.error: Exception | None = None
        self.unfollowed = 0

    def unfollow_lease(self) -> None:
        self.unfollowed += 1

    async def deregister(self) -> None:
        await self.deregistering.wait()
        self.done.append("deregistered")

    def stop_accepting(self, linger_s: float) -> None:
        self.done.append(f"refusing after {linger_s:g}")

    async def finish(self) -> None:
        await self.finishing.wait()
        self.done.append("finished")

    async def resume(self) -> None:
        await self.resuming.wait()
        if self.error is not None:
            raise self.error
        self.done.append("resumed")


@pytest.fixture
async def steps() -> HandSteps:
    """Deregistering and resuming work at once, finishing waits."""
    return HandSteps()


@pytest.fixture
async def drain(steps: HandSteps) -> Drain:
    made = Drain(steps)
    assert made.started()
    return made


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_drain_deregisters_then_refuses_then_finishes_then_leaves(steps: HandSteps, drain: Drain) -> None:
    drain.begin("asked")
    assert steps.unfollowed == 1
    await settle()
    assert steps.done == ["deregistered", f"refusing after {LINGER_S:g}"]
    assert (drain.phase, drain.reason, drain.left.done()) == (Phase.DRAINING, "asked", False)
    steps.finishing.set()
    assert await drain.left == "asked"
    assert (steps.done[-1], drain.phase) == ("finished", Phase.LEAVING)


async def test_without_etcd_new_requests_are_refused_at_once(
    steps: HandSteps, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No linger where the keys cannot be deleted: callers would come for ever."""
    monkeypatch.setattr(worker_drain, "DEREGISTER_PATIENCE_S", 0.01)
    steps.deregistering.clear()
    drain.begin("asked")
    async with asyncio.timeout(2):
        while not steps.done:
            await asyncio.sleep(0.005)
    assert steps.done == ["refusing after 0"]
    steps.finishing.set()
    assert await drain.left == "asked"


async def test_while_starting_a_worker_leaves_at_once(steps: HandSteps) -> None:
    drain = Drain(steps)
    drain.begin("SIGTERM")
    assert drain.left.result() == "SIGTERM"
    assert (drain.started(), drain.phase, steps.done) == (False, Phase.LEAVING, [])


async def test_a_worker_that_others_have_found_drains_when_its_start_is_over(steps: HandSteps) -> None:
    """It may have taken requests by then."""
    drain = Drain(steps)
    drain.found = True
    drain.begin("SIGTERM")
    assert (drain.phase, drain.left.done()) == (Phase.STARTING, False)
    assert drain.started()
    assert drain.phase is Phase.DRAINING
    steps.finishing.set()
    assert await drain.left == "SIGTERM"
    assert steps.done == ["deregistered", f"refusing after {LINGER_S:g}", "finished"]


async def test_a_drain_of_a_start_that_does_not_end_leaves_all_the_same(
    steps: HandSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_drain, "STARTED_WITHIN_S", 0.01)
    drain = Drain(steps)
    drain.found = True
    drain.begin("SIGTERM")
    async with asyncio.timeout(2):
        assert await drain.left == "SIGTERM"
    assert not drain.started()


async def test_a_drain_of_a_start_is_taken_back(steps: HandSteps) -> None:
    drain = Drain(steps)
    drain.found = True
    drain.begin("SIGTERM")
    await drain.cancel()
    assert (drain.started(), drain.phase) == (True, Phase.READY)


async def test_who_waits_for_the_start_of_a_worker_that_others_have_found_is_told(steps: HandSteps) -> None:
    drain = Drain(steps)
    await drain.start_ended()  # nobody can have found it
    drain.found = True
    waiting = asyncio.create_task(drain.start_ended())
    await settle()
    assert not waiting.done()
    drain.started()
    async with asyncio.timeout(2):
        await waiting


async def test_a_second_begin_changes_nothing(steps: HandSteps, drain: Drain) -> None:
    drain.begin("first")
    drain.begin("second")
    await settle()
    drain.begin("third")
    steps.finishing.set()
    assert await drain.left == "first"
    assert steps.done == ["deregistered", f"refusing after {LINGER_S:g}", "finished"]
    drain.begin("after the end")
    assert drain.reason == "first"


async def test_a_drain_is_taken_back_many_times(steps: HandSteps, drain: Drain) -> None:
    for n in range(10):
        drain.begin(f"drain {n}")
        for _ in range(n % 4):
            await asyncio.sleep(0)
        await drain.cancel()
        assert (drain.phase, drain.reason) == (Phase.READY, None)
    assert steps.done.count("resumed") == 10
    assert "finished" not in steps.done
    drain.begin("the last")
    steps.finishing.set()
    assert await drain.left == "the last"


async def test_past_the_end_the_answer_is_a_refusal(steps: HandSteps, drain: Drain) -> None:
    drain.begin("asked")
    steps.finishing.set()
    await drain.left
    with pytest.raises(DrainNotCancellable, match="shutting down"):
        await drain.cancel()
    assert "resumed" not in steps.done


async def test_taking_back_wins_over_an_end_in_the_same_turn(steps: HandSteps, drain: Drain) -> None:
    """The last stream ends, and the order comes before the drain has run on: it is ready, and did not leave."""
    drain.begin("asked")
    await settle()
    steps.finishing.set()
    await drain.cancel()
    await settle()
    assert (drain.phase, drain.left.done()) == (Phase.READY, False)


async def test_taking_back_what_does_not_drain_is_no_error(steps: HandSteps, drain: Drain) -> None:
    await drain.cancel()
    assert (drain.phase, steps.done) == (Phase.READY, [])


async def test_a_drain_that_cannot_be_taken_back_goes_on(steps: HandSteps, drain: Drain) -> None:
    steps.error = EtcdUnavailable("away")
    drain.begin("asked")
    await settle()
    with pytest.raises(EtcdUnavailable):
        await drain.cancel()
    await settle()
    assert (drain.phase, drain.reason) == (Phase.DRAINING, "asked")
    assert steps.done == ["deregistered", f"refusing after {LINGER_S:g}"] * 2
    steps.finishing.set()
    assert await drain.left == "asked"


async def test_callers_who_take_it_back_together_get_the_same_answer(steps: HandSteps, drain: Drain) -> None:
    drain.begin("asked")
    await settle()
    steps.resuming.clear()
    callers = [asyncio.create_task(drain.cancel()) for _ in range(3)]
    await settle()
    callers[0].cancel()
    steps.resuming.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [None, None]
    assert (drain.phase, steps.done.count("resumed")) == (Phase.READY, 1)


async def test_an_order_to_drain_that_comes_while_resuming_is_kept(steps: HandSteps, drain: Drain) -> None:
    drain.begin("first")
    await settle()
    steps.resuming.clear()
    caller = asyncio.create_task(drain.cancel())
    await settle()
    drain.begin("second")
    steps.resuming.set()
    await caller
    assert (drain.phase, drain.reason) == (Phase.DRAINING, "second")
    steps.finishing.set()
    assert await drain.left == "second"


async def test_an_order_to_drain_that_comes_while_resuming_is_taken_back_too(steps: HandSteps, drain: Drain) -> None:
    """The last order wins, however slowly it comes back: it left after both had been told that it stays."""
    drain.begin("first")
    await settle()
    steps.resuming.clear()
    first = asyncio.create_task(drain.cancel())
    await settle()
    drain.begin("second")
    second = asyncio.create_task(drain.cancel())
    await settle()
    steps.resuming.set()
    await asyncio.gather(first, second)
    await settle()
    assert (drain.phase, drain.left.done()) == (Phase.READY, False)


async def test_a_defect_in_a_step_does_not_keep_the_worker(
    steps: HandSteps, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that neither serves nor goes would be the worst of both."""

    async def broken() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(steps, "finish", broken)
    drain.begin("asked")
    assert await drain.left == "asked"
