"""Commands as the arbiter gives them: what the caller is answered, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dynamo_local.arbiter.commands import CALL_BACK_TIMEOUT_S, Commands
from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.effects import Act
from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.core.fleet.effects import CallBack, Spawn
from dynamo_local.core.fleet.events import CalledBack, Change, Drain, Restart, Scale, ScaleAll
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.lifecycle import TransitionKind
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DrainNotCancellable, NotEnoughGpus
from dynamo_local.system.gpu_locks import GpuLocked
from dynamo_local.system.gpu_pool import GpuSample
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.effects import FakeEffects, shell_of
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, name, on_ledger, pid_of, worker

GPUS = 2


class Looks:
    """Shows what NVML and the locks of others show, look by look; the last sample stays."""

    def __init__(self, *samples: GpuSample) -> None:
        self.samples = list(samples or [seen()])
        self.count = 0

    async def look(self) -> GpuSample:
        """As `GpuPool.look`."""
        self.count += 1
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]


def seen(elsewhere: dict[str, str] | None = None) -> GpuSample:
    """Two empty devices."""
    return GpuSample(tuple(SimInventory(GPUS).sample()), elsewhere or {})


FREE = seen().devices[1].uuid
"""The device that the ready worker on the other leaves."""


class House:
    """One fleet, one who gives orders, and what came of them."""

    def __init__(self, view: Fleet, looks: Looks | None = None, answers: dict[type, Any] | None = None) -> None:
        self.effects = FakeEffects(quick=True, answers=answers or {})
        self.looks = looks or Looks()
        self.controller: FleetController = shell_of(view, self.effects)
        self.commands = Commands(self.controller, self.looks.look)

    async def one_more(self, **options: Any) -> dict[str, Any]:
        return await self.commands.run(
            Scale(stimulus_id="scale:1", component="VllmWorker", target=Change(1, relative=True), **options)
        )


def one_ready() -> Fleet:
    return fleet("ready", gpus=GPUS)


def spawned(effects: FakeEffects) -> list[str]:
    return [act.name for act in effects.asked if isinstance(act, Spawn)]


# --- GPU locks -------------------------------------------------------------------------------------


async def test_a_lock_that_somebody_only_asked_about_costs_one_more_look() -> None:
    """Another namespace asks who holds the device in the very instant in which we lock it: nobody has it."""
    house = House(one_ready())
    house.effects.refuse_locks = [GpuLocked(FREE, "an arbiter that only looks")]
    answer = await house.one_more()
    assert (house.looks.count, answer["target"]) == (2, 2)
    assert spawned(house.effects) == [name(1)]
    assert house.effects.locked == {FREE}
    requested = [each for each in house.effects.transitions if each.kind is TransitionKind.SPAWN_REQUESTED]
    assert len(requested) == 1


async def test_a_device_that_somebody_took_meanwhile_is_a_refusal_that_says_who() -> None:
    house = House(one_ready(), Looks(seen(), seen({FREE: "namespace other (watcher other_W, arbiter pid 9)"})))
    house.effects.refuse_locks = [GpuLocked(FREE, "namespace other")]
    with pytest.raises(NotEnoughGpus, match="namespace other \\(watcher other_W, arbiter pid 9\\)"):
        await house.one_more()
    assert house.looks.count == 2
    assert (list(house.controller.fleet.workers), house.effects.locked) == ([name()], set())


async def test_a_lock_that_is_refused_again_and_again_is_not_asked_for_for_ever() -> None:
    house = House(one_ready())
    house.effects.refuse_locks = [GpuLocked(FREE, "somebody") for _ in range(9)]
    with pytest.raises(NotEnoughGpus):
        await house.one_more()
    assert house.looks.count == 2
    assert house.effects.locked == set()


async def test_too_few_gpus_without_a_refused_lock_are_looked_at_once() -> None:
    house = House(fleet("ready", "ready", gpus=GPUS))
    with pytest.raises(NotEnoughGpus):
        await house.one_more()
    assert house.looks.count == 1


async def test_another_free_device_is_taken_instead_of_the_refused_one() -> None:
    view = fleet("ready", gpus=3)
    house = House(view, Looks(GpuSample(tuple(SimInventory(3).sample()))))
    refused = next(device.uuid for device in view.gpus.free)
    house.effects.refuse_locks = [GpuLocked(refused, "namespace other")]
    await house.one_more()
    assert house.looks.count == 1
    assert f"lock {name(1)}" in house.effects.journal
    assert refused not in house.effects.locked


async def test_a_look_that_failed_takes_no_device_away() -> None:
    house = House(one_ready(), Looks(GpuSample(stale="the GPU driver did not answer within 5 s")))
    await house.one_more()
    assert spawned(house.effects) == [name(1)]


async def test_a_restart_that_needs_a_device_for_the_substitute_looks_for_one_first() -> None:
    """A stranger was on it when the devices were last looked at, and has gone since."""
    view = one_ready()
    taken = view.gpus.reserved_elsewhere(FREE, "namespace other")
    house = House(replace(view, gpus=taken))
    answer = await house.commands.run(Restart(stimulus_id="restart:1", name=name()))
    assert (answer["workers"], answer["substitutes"]) == ([name()], {name(): name(1)})
    assert (house.looks.count, spawned(house.effects)) == (1, [name(1)])


async def test_a_device_whose_quarantine_may_have_ended_is_looked_at_before_a_refusal() -> None:
    view = one_ready()
    house = House(replace(view, gpus=view.gpus.quarantine(FREE, "pid 7 still holds it")))
    await house.one_more()
    assert (house.looks.count, spawned(house.effects)) == (1, [name(1)])
    assert house.controller.fleet.gpus.quarantined == {}


# --- several components -----------------------------------------------------------------------------


async def test_a_decision_about_two_components_is_answered_for_each() -> None:
    view = on_ledger([worker(0, "ready", PREFILL), worker(0, "ready"), worker(1, "ready")], GPUS + 1)
    house = House(view, Looks(GpuSample(tuple(SimInventory(GPUS + 1).sample()))))
    answer = await house.commands.run(ScaleAll(stimulus_id="planner:3", targets={"PrefillWorker": 2, "VllmWorker": 1}))
    told = {
        component: [(each["kind"], each["watcher_name"]) for each in one["instructions"]]
        for component, one in answer.items()
    }
    assert told == {"VllmWorker": [("drain", name(1))], "PrefillWorker": [("spawn", name(1, "PrefillWorker"))]}
    assert {component: one["target"] for component, one in answer.items()} == {"PrefillWorker": 2, "VllmWorker": 1}


async def test_a_lock_that_is_refused_takes_the_whole_decision_back() -> None:
    view = on_ledger([worker(0, "ready", PREFILL), worker(0, "ready")], 4)
    first = view.gpus.free[0].uuid
    house = House(view, Looks(GpuSample(tuple(SimInventory(4).sample()))))
    house.effects.refuse_locks = [GpuLocked(first, "somebody") for _ in range(9)]
    with pytest.raises(NotEnoughGpus):
        await house.commands.run(ScaleAll(stimulus_id="planner:3", targets={"PrefillWorker": 2, "VllmWorker": 2}))
    assert list(house.controller.fleet.workers) == list(view.workers)
    assert house.effects.locked == set()


# --- a drain that is taken back --------------------------------------------------------------------


def answering(error: str | None) -> Callable[[Act], CalledBack]:
    """A worker that answers so when it is called back."""

    def answer(act: Act) -> CalledBack:
        assert isinstance(act, CallBack)
        return CalledBack(stimulus_id="control", name=act.name, pid=act.pid, error=error, requested_by=act.requested_by)

    return answer


def leaving() -> Fleet:
    return fleet("ready", "draining", gpus=GPUS)


async def test_a_cancel_is_answered_when_the_worker_has_registered_again() -> None:
    house = House(leaving(), answers={CallBack: answering(None)})
    answer = await house.commands.run(Drain(stimulus_id="drain:1", name="VllmWorker_1", cancel=True))
    assert (answer["watcher_name"], answer["state"]) == (name(1), "ready")
    assert [each["kind"] for each in answer["instructions"]] == ["cancel_drain"]


async def test_what_the_worker_says_against_it_is_the_refusal() -> None:
    house = House(leaving(), answers={CallBack: answering("it is past the point of no return")})
    with pytest.raises(DrainNotCancellable, match=f"the drain of {name(1)} could not be taken back: it is past"):
        await house.commands.run(Drain(stimulus_id="drain:1", name=name(1), cancel=True))
    assert house.controller.fleet.workers[name(1)].state is WorkerState.DRAINING


async def test_the_answer_to_another_command_is_not_this_ones() -> None:
    """Ordered to leave again and called back once more, the worker answers the first call only now."""
    house = House(leaving(), answers={CallBack: None})
    late = partial(CalledBack, stimulus_id="control", name=name(1), pid=pid_of(1))
    waiting = asyncio.ensure_future(house.commands.run(Drain(stimulus_id="drain:2", name=name(1), cancel=True)))
    async with asyncio.timeout(10.0):
        while not house.effects.asked:
            await asyncio.sleep(0)
    house.controller.feed(late(error="it has exited", requested_by="drain:1"))
    house.controller.feed(late(requested_by="drain:2"))
    assert (await waiting)["state"] == "ready"


def test_a_worker_that_does_not_answer_is_a_refusal_after_a_bounded_time() -> None:

    async def scenario() -> float:
        house = House(leaving(), answers={CallBack: None})
        began_s = AsyncioClock().now_s()
        with pytest.raises(DrainNotCancellable, match=f"it did not answer within {CALL_BACK_TIMEOUT_S:g} s"):
            await house.commands.run(Drain(stimulus_id="drain:1", name=name(1), cancel=True))
        waited_s = AsyncioClock().now_s() - began_s
        house.controller.feed(CalledBack(stimulus_id="late", name=name(1), pid=pid_of(1), requested_by="drain:1"))
        assert house.controller.fleet.workers[name(1)].ready
        return waited_s

    assert run_virtual(scenario()) == pytest.approx(CALL_BACK_TIMEOUT_S)


async def test_a_worker_that_serves_is_not_called_back() -> None:
    house = House(fleet("ready", gpus=GPUS))
    answer = await house.commands.run(Drain(stimulus_id="drain:1", name=name(), cancel=True))
    assert (answer["state"], answer["instructions"], house.effects.asked) == ("ready", [], [])


async def test_a_worker_that_is_past_its_deadline_cannot_be_called_back() -> None:
    house = House(fleet("ready", "drain_timed_out", gpus=GPUS))
    with pytest.raises(DrainNotCancellable):
        await house.commands.run(Drain(stimulus_id="drain:1", name=name(1), cancel=True))
    assert house.effects.asked == []


async def test_an_answer_names_the_worker_by_its_whole_name() -> None:
    """`VllmWorker_1` will do on the command line."""
    house = House(fleet("ready", "ready", gpus=GPUS))
    answer = await house.commands.run(Drain(stimulus_id="drain:1", name="VllmWorker_1"))
    assert (answer["watcher_name"], answer["state"]) == (name(1), "draining")
