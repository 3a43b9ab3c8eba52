"""`dynamo apply -f FILE` on a running graph: exactly what differs, worker by worker, and no request is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.drivers.scaled import load, names, settled
from tests.drivers.served import AGG, EXAMPLE, Served, auntil, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

APPLY_TIMEOUT_S = 120.0
REQUESTS = 200
BASE: dict[str, Any] = yaml.safe_load((EXAMPLE / "configs" / "agg.yaml").read_text())


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    """The shipped aggregated graph, with two workers, and these sections' keys over it."""
    made = json.loads(json.dumps(BASE))
    made.setdefault("Frontend", {}).update({"port": 0, "ServiceArgs": {"colocate": []}})
    made.setdefault("VllmWorker", {}).setdefault("ServiceArgs", {})["workers"] = 2
    for name, section in sections.items():
        for key, value in section.items():
            into = made.setdefault(name, {})
            into[key] = {**into.get(key, {}), **value} if isinstance(value, dict) else value
    return made


def write(served: Served, deployment: dict[str, Any], name: str = "wanted.yaml") -> str:
    path = served.folder / name
    path.write_text(yaml.safe_dump(deployment))
    return str(path)


async def apply(served: Served, deployment: dict[str, Any], *words: str) -> dict[str, Any]:
    file = write(served, deployment)
    done = await asyncio.to_thread(served.ok, "apply", "-f", file, "--json", *words, timeout_s=APPLY_TIMEOUT_S)
    said: dict[str, Any] = json.loads(done)
    return said


def changes(said: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {each["what"]: (each["before"], each["after"]) for each in said["changes"]}


def folder_with_config() -> Served:
    """The aggregated graph on four GPUs, from a file of its own, whose workers outlive their arbiter."""
    served = Served("--gpus", "sim:4", "--on-arbiter-death", "keep", target=AGG[:1], frontend=False)
    served.serve_with(write(served, config(), "served.yaml"))
    return served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with folder_with_config() as served:
        yield served.start()


@pytest.fixture
async def graph(shared: Served) -> Served:
    await apply(shared, config())
    await settled(shared)
    return shared


async def test_options_counts_and_the_planner_change_under_load_and_nothing_is_dropped(graph: Served) -> None:
    before = graph.pids()
    planner = {"Planner": {"enabled": False, "max-gpu-budget": 4}}
    wanted = config(VllmWorker={"sim": {"speed": 2.0}, "ServiceArgs": {"workers": 3}}, **planner)
    async with load(graph) as streams:
        said = await apply(graph, wanted)
        await streams.more(REQUESTS - streams.right if streams.right < REQUESTS else 1)
    streams.check()
    assert changes(said) == {
        "VllmWorker.sim.speed": (1.0, 2.0),
        "VllmWorker.ServiceArgs.workers": (2, 3),
        "Planner.max_gpu_budget": (8, 4),
    }
    assert names(graph, "VllmWorker") == ["VllmWorker", "VllmWorker_1", "VllmWorker_2"]
    kept = {name for name, pid in graph.pids().items() if before.get(name) == pid}
    assert kept == {"Frontend", "Processor"}
    assert graph.status()["planner"]["options"]["max_gpu_budget"] == 4
    assert json.loads(graph.statefile()["environment"]["DYNAMO_SERVICE_CONFIG"])["VllmWorker"]["sim"]["speed"] == 2.0


async def test_a_dry_run_shows_the_same_and_changes_nothing(graph: Served) -> None:
    pids, file = graph.pids(), graph.statefile()
    wanted = config(Processor={"router": "random"}, VllmWorker={"ServiceArgs": {"envs": {"MY_TOKEN": "s3cret"}}})
    said = await apply(graph, wanted, "--dry-run")
    assert changes(said)["Processor.router"][1] == "random"
    assert changes(said)["VllmWorker.ServiceArgs.envs.MY_TOKEN"] == (None, "****")
    assert said["workers"]["renew"] == ["dynamo_VllmWorker_1", "dynamo_VllmWorker", "dynamo_Processor"]
    assert (graph.pids(), graph.statefile()["environment"]) == (pids, file["environment"])
    assert (await apply(graph, config()))["changes"] == []
    assert graph.pids() == pids


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("VllmWorker: {ServiceArgs: {workers: many}}", ["workers"]),
        ("VllmWorker: [", ["wanted.yaml"]),
        ("VllmWroker: {}", ["VllmWroker", "did you mean"]),
        (
            yaml.safe_dump(config(Host={"etcd-endpoints": "localhost:1"}, VllmWorker={"ServiceArgs": {"workers": 9}})),
            ["Host.etcd_endpoints", "too few GPUs"],
        ),
    ],
)
def test_what_cannot_be_applied_is_refused_before_anything_happens(shared: Served, text: str, told: list[str]) -> None:
    until(lambda: set(shared.states().values()) <= {"ready", "exited"}, what=shared.states)
    pids, before = shared.pids(), shared.statefile()
    path = shared.folder / "wanted.yaml"
    path.write_text(text)
    done = shared.cli("apply", "-f", str(path))
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert all(each in done.stderr for each in told), done.stderr
    assert "Traceback" not in done.stderr
    assert (shared.pids(), shared.statefile()["environment"]) == (pids, before["environment"])


@pytest.mark.full
async def test_ctrl_c_leaves_the_arbiter_at_it() -> None:
    with folder_with_config().started() as served:
        before = served.pids()
        wanted = write(served, config(VllmWorker={"sim": {"speed": 2.0, "start-up-s": 3.0}}))
        watching = served.popen("apply", "-f", wanted)
        await auntil(lambda: served.states().get("VllmWorker_1") in ("draining", "exited", "starting"), 60.0)
        watching.send_signal(2)
        assert await asyncio.to_thread(watching.wait, 20.0) == 130
        assert "the arbiter goes on with it" in served.foreground_output()
        async with load(served, streams=4) as streams:
            await asyncio.to_thread(served.kill_arbiter)
            refused = await asyncio.to_thread(served.cli, *served.serve_words("--adopt", "--detach"), timeout_s=60.0)
            assert refused.returncode == 2
            assert "`dynamo apply -f FILE`" in refused.stderr
            served.serve_with(wanted)
            await asyncio.to_thread(served.adopt)
            await auntil(lambda: served.status()["changes"] == [], 60.0, what=served.status)
            await settled(served)
            await streams.more(12)
        streams.check()
        after = served.pids()
        assert {name for name in before if before[name] == after.get(name)} == {"Frontend", "Processor"}
        assert not any(row["outdated"] for row in served.status()["workers"])
