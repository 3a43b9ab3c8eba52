"""`Host.spares` on real processes: workers made of spares serve, die, restart and are adopted as any others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.system.processes import is_alive, parent_and_session
from tests.drivers.mixed_actions import WORDS as MIXED
from tests.drivers.mixed_actions import run as mixed_run
from tests.drivers.served import AGG, Served, until

pytestmark = pytest.mark.infra

SPARES = ("--Host.spares=1",)
WARM_S = 60.0


def spares(served: Served) -> list[dict[str, Any]]:
    told: dict[str, Any] = served.status()["spares"]
    found: list[dict[str, Any]] = told["spares"]
    return found


def warm(served: Served) -> dict[str, Any]:
    return until(lambda: next((s for s in spares(served) if s["state"] == "warm"), None), WARM_S, what=served.status)


def scaled_up(served: Served, step: str = "+1") -> None:
    served.ok("scale", "VllmWorker", step, "--wait")


def variables(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*SPARES, target=AGG) as served:
        yield served.start()


async def test_a_spare_becomes_the_worker_under_its_pid_and_another_one_follows(served: Served) -> None:
    spare = warm(served)
    assert served.statefile()["spares"][spare["watcher_name"]]["pid"] == spare["pid"]
    scaled_up(served)
    worker = served.worker("VllmWorker_1")
    pid = worker["pid"]
    assert pid == spare["pid"]
    around = parent_and_session(pid)
    assert around == (served.status()["arbiter_pid"], pid)
    shown = variables(pid)
    assert shown["DYN_WATCHER_NAME"] == "dynamo_VllmWorker_1"
    assert (shown["DYN_NAMESPACE"], shown["DYN_STATEFILE"]) == ("dynamo", str(served.paths.statefile))
    entry = served.statefile()["components"]["dynamo_VllmWorker_1"]
    assert shown["CUDA_VISIBLE_DEVICES"] == ",".join(entry["resources"]["gpu_uuids"])
    assert entry["pid"] == pid
    assert "serve_dynamo graphs.agg:Frontend" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    assert "ready: lease" in served.log("VllmWorker_1")
    assert str(pid) in served.cli("ctl", "list", "dynamo_VllmWorker_1").stdout
    rungs = {(lead["component"], lead["rung"]): lead for lead in served.status()["lead_times"]}
    assert rungs["VllmWorker", "spare"]["run"]["last_s"] < rungs["VllmWorker", "cold"]["run"]["last_s"]
    assert warm(served)["pid"] != pid


async def test_a_restart_takes_a_spare(served: Served) -> None:
    spare = warm(served)
    served.ok("restart", "dynamo_VllmWorker", "--wait")
    assert served.worker("VllmWorker")["pid"] == spare["pid"]


async def test_a_worker_that_was_a_spare_and_dies_is_a_crash_of_that_worker(served: Served) -> None:
    warm(served)
    before = served.worker("VllmWorker")
    os.kill(before["pid"], signal.SIGKILL)
    after = until(
        lambda: (w := served.worker("VllmWorker"))["state"] == "ready" and w["pid"] != before["pid"] and w, WARM_S
    )
    assert after["restarts"] == before["restarts"] + 1
    crashed = served.cli("events", "--worker", "VllmWorker").stdout
    assert "SIGKILL" in crashed, crashed


@pytest.mark.full
async def test_a_spare_that_dies_is_replaced_after_a_delay_and_said(served: Served) -> None:
    spare = warm(served)
    os.kill(spare["pid"], signal.SIGKILL)
    told = until(lambda: (t := served.status()["spares"])["failures"] and t, what=served.status)
    assert "SIGKILL" in told["reason"]
    assert "the last one failed" in served.cli("status").stdout
    assert warm(served)["pid"] != spare["pid"]


@pytest.mark.full
async def test_no_spare_outlives_a_killed_arbiter() -> None:
    with Served(*SPARES, target=AGG).started() as own:
        warm(own)
        scaled_up(own)
        pids = [warm(own)["pid"], *own.pids().values()]
        own.kill_arbiter()
        until(lambda: not any(is_alive(pid) for pid in pids), what=lambda: [p for p in pids if is_alive(p)])
        until(lambda: not own.leftovers(), what=own.leftovers)


@pytest.mark.full
async def test_a_worker_that_was_a_spare_is_adopted_and_spares_begin_anew() -> None:
    with Served(*SPARES, "--on-arbiter-death", "keep", target=AGG).started() as own:
        warm(own)
        scaled_up(own)
        spare, pids = warm(own), own.pids()
        own.kill_arbiter()
        until(lambda: not is_alive(spare["pid"]))
        own.adopt()
        assert own.pids() == pids
        assert warm(own)["pid"] not in (spare["pid"], *pids.values())
        assert own.status()["state"] == "ready"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "actions", "requests"), [(1, 20, 200), (14, 200, 2000)])
async def test_mixed_actions_drop_no_request(seed: int, actions: int, requests: int) -> None:
    with Served(*MIXED).started() as own:
        mixed, load = await mixed_run(own, seed=seed, actions=actions, requests=requests)
        assert load.failures == [], f"seed {seed}: {mixed.story}"
        assert load.right >= requests
        assert mixed.done.total() + mixed.refused.total() == actions
        assert {"flip", "sleep", "wake"} <= mixed.done.keys() or actions < 200, mixed.done
        ways = {lead["rung"] for lead in own.status()["lead_times"] if lead["run"]}
        many = {"flip_to_decode", "flip_to_prefill", "wake_1", "sleep_1"} if actions >= 200 else set()
        assert {"spare", "cold", *many} <= ways, ways
