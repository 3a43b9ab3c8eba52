"""Graphs on real devices: pinned by UUID, guarded against strangers, given back when their memory is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo_local.core.gpus import GpuDevice, occupant
from dynamo_local.errors import EXIT_BAD_INPUT
from tests.drivers.scaled import events
from tests.drivers.served import AGG, MODEL, Served, expected, messages, until
from tests.gpu.conftest import Cards

pytestmark = [pytest.mark.gpu, pytest.mark.infra, pytest.mark.timeout(180)]

Saw = Callable[..., None]
START_S, RETURN_S = 60.0, 60.0
"""RETURN_S: longer than a GPU's memory may take to come back before the device is quarantined."""
SEEN = "seen-{pid}.json"
HOLDER = f"""\
import json
import os
from pathlib import Path

from dynamo_local.sdk import endpoint, service
from tests.gpu.holder import GIB, hold


@service(name="Holder", resources={{"gpu": 1}})
class Holder:
    def __init__(self) -> None:
        devices, uuid = hold(GIB)
        Path("{SEEN}".format(pid=os.getpid())).write_text(json.dumps({{"devices": devices, "uuid": uuid}}))

    @endpoint()
    async def generate(self, request: dict):
        yield request
"""
"""A worker that holds memory of its device, as an engine does."""


@pytest.fixture
def holder(cards: Cards, idle: GpuDevice) -> Iterator[Served]:
    words = ("--gpus", idle.uuid, "--Host.restart.first-s=0.1")
    files = {"holder_graph.py": HOLDER}
    with Served(*words, target=("holder_graph:Holder",), files=files, frontend=False, env=cards.env) as served:
        yield served.start()
    cards.until(idle.uuid, lambda device: occupant(device) is None)


def seen_by(served: Served, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(served.cwd, SEEN.format(pid=pid)).read_text())
    return found


def state_of(served: Served, uuid: str) -> dict[str, Any]:
    """The device, as `dynamo status` has it."""
    (found,) = (gpu for gpu in served.status()["gpus"] if gpu["uuid"] == uuid)
    return dict(found)


def test_a_worker_has_its_device_alone(cards: Cards, idle: GpuDevice, holder: Served, saw: Saw) -> None:
    pid = holder.pids()["Holder"]
    saw(seen=seen_by(holder, pid))
    assert seen_by(holder, pid) == {"devices": 1, "uuid": idle.uuid}
    assert psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] == idle.uuid
    assert state_of(holder, idle.uuid)["state"] == "held"
    assert occupant(cards.device(idle.uuid)) is not None
    other = Served(
        "--gpus", idle.uuid, target=("holder_graph:Holder",), namespace="other", beside=holder, frontend=False,
        env=cards.env, cwd=holder.cwd,
    )  # fmt: skip
    refused = other.cli(*other.serve_words())
    assert refused.returncode == EXIT_BAD_INPUT, refused.stderr
    assert "is held by" in refused.stderr


def test_a_killed_worker_comes_back_on_its_device(cards: Cards, idle: GpuDevice, holder: Served, saw: Saw) -> None:
    """The new worker has no room until the dead one's memory is back."""
    before = holder.pids()["Holder"]
    os.kill(before, signal.SIGKILL)
    until(lambda: holder.states() == {"Holder": "ready"} and holder.pids().get("Holder") not in (None, before), START_S,
          what=holder.states)  # fmt: skip
    after = holder.pids()["Holder"]
    assert seen_by(holder, after) == {"devices": 1, "uuid": idle.uuid}
    saw(events=[event["event"] for event in events(holder, "Holder")])
    processes = cards.device(idle.uuid).processes
    assert before not in {process.pid for process in processes}  # type: ignore[union-attr]


@pytest.mark.full
def test_a_device_whose_memory_does_not_come_back_is_quarantined(
    cards: Cards, idle: GpuDevice, holder: Served, saw: Saw
) -> None:
    with cards.holding(idle):
        holder.ok("drain", "dynamo_Holder", "--force", timeout_s=RETURN_S)
        until(lambda: idle.uuid in holder.status()["quarantined_gpus"], RETURN_S, what=holder.status)
        saw(why=holder.status()["quarantined_gpus"][idle.uuid])
        assert state_of(holder, idle.uuid)["state"] == "quarantined"
        assert holder.cli("scale", "Holder", "1").returncode != 0
    cards.until(idle.uuid, lambda device: occupant(device) is None)
    holder.ok("scale", "Holder", "1", timeout_s=START_S)  # whoever wants a device has all of them looked at
    until(lambda: holder.states() == {"Holder": "ready"}, START_S, what=holder.states)


def test_a_device_with_a_stranger_on_it_starts_nothing(cards: Cards, idle: GpuDevice, saw: Saw) -> None:
    with cards.holding(idle):
        cards.until(idle.uuid, lambda device: occupant(device) is not None)
        with Served("--gpus", idle.uuid, target=AGG, env=cards.env) as served:
            done = served.cli(*served.serve_words())
            assert done.returncode == EXIT_BAD_INPUT, done.stderr
            assert "is held by" in done.stderr
            saw(refusal=done.stderr.strip())
            assert not served.paths.statefile.exists()
    cards.until(idle.uuid, lambda device: occupant(device) is None)


async def test_the_shipped_graph_serves_pinned_to_a_real_device(cards: Cards, idle: GpuDevice, saw: Saw) -> None:
    with Served("--gpus", idle.uuid, target=AGG, env=cards.env).started() as served:
        visible = {name: psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for name, pid in served.pids().items()}
        saw(visible=visible)
        assert visible == {"Frontend": "", "VllmWorker": idle.uuid}
        async with served.client() as client:
            answer = await client.chat.completions.create(model=MODEL, messages=messages("Hi"), max_tokens=8)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == expected("Hi", 8)[0]
        assert state_of(served, idle.uuid)["state"] == "held"
        assert served.down().returncode == 0
