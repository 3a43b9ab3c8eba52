"""`ls`, `logs` and `events` as a user runs them beside real graphs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.drivers.scaled import scale
from tests.drivers.served import AGG, Served, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def agg() -> Iterator[Served]:
    with Served(target=AGG) as served:
        yield served.start()


def _listed(served: Served) -> dict[str, dict[str, object]]:
    """`dynamo ls --json`, by namespace."""
    return {run["namespace"]: run for run in json.loads(served.cli("ls", "--json").stdout)}


@pytest.mark.full
def test_ls_lists_a_graph_that_runs_and_one_whose_arbiter_was_killed(agg: Served) -> None:
    with Served("--on-arbiter-death", "keep", target=AGG, namespace="other", beside=agg) as other:
        other.start()
        both = _listed(agg)
        table = agg.cli("ls").stdout.splitlines()
        other.kill_arbiter(guardian=True)
        killed = _listed(agg)["other"]
        other.down()
        left = _listed(agg)
    run = both["dynamo"]
    assert (run["state"], run["workers_ready"], run["workers"], run["gpus"]) == ("ready", 2, 2, ["0"])
    assert (run["frontend_url"], run["run_id"]) == (agg.url, agg.status()["run_id"])
    assert [line.split()[0] for line in table] == ["NAMESPACE", "dynamo", "other"]
    assert agg.url in table[1]
    assert (killed["state"], killed["workers"], killed["gpus"]) == ("kept", 2, ["0"])
    assert "2 workers live on" in str(killed["note"])
    assert set(left) == {"dynamo"}


def test_logs_of_a_component_follow_workers_that_come_later(agg: Served) -> None:
    process = agg.popen("logs", "VllmWorker", "-f", "--since", "1h")
    try:
        until(lambda: "[dynamo_VllmWorker] " in agg.foreground_output(), what=agg.foreground_output)
        scale(agg, "VllmWorker", "+1")
        until(lambda: "[dynamo_VllmWorker_1] " in agg.foreground_output(), 60.0, what=agg.foreground_output)
    finally:
        process.send_signal(signal.SIGINT)
    assert agg.reap_foreground() == 0
    until(lambda: agg.states().get("VllmWorker_1") == "ready", 60.0, what=agg.states)
    whole = agg.cli("logs", "VllmWorker", "-l", "1000").stdout.splitlines()
    scale(agg, "VllmWorker", "1")
    until(lambda: "VllmWorker_1" not in agg.states(), 60.0, what=agg.states)
    assert {line.split()[0] for line in agg.foreground_output().splitlines()} == {
        "[dynamo_VllmWorker]",
        "[dynamo_VllmWorker_1]",
    }
    times = [" ".join(line.split()[1:3]) for line in whole if line.split()[1].startswith("20")]
    assert times == sorted(times)
    assert {line.split()[0] for line in whole} == {"[dynamo_VllmWorker]", "[dynamo_VllmWorker_1]"}


@pytest.mark.full
def test_a_second_run_begins_its_logs_anew_and_the_first_one_s_are_still_shown() -> None:
    with Served(target=AGG) as served:
        served.start()
        first = served.status()
        served.kill_arbiter()
        until(lambda: not served.paths.statefile.exists(), 30.0, what=served.processes)
        served.start()
        second = served.status()
        lines = served.cli("logs", "VllmWorker", "-l", "1000").stdout.splitlines()
        written = served.log("VllmWorker")
        served.down()
        told = [line.split(maxsplit=2)[2] for line in served.cli("events").stdout.splitlines() if "----" in line]
    (pid, run), (killed, before) = ((each["arbiter_pid"], each["run_id"]) for each in (second, first))
    assert len([line for line in lines if "ready: lease" in line]) == 2
    assert written.count("ready: lease") == 1
    assert told == [
        f"---- run {before} begins: graphs.agg:Frontend, arbiter pid {killed} ----",
        f"---- run {before} ends: its arbiter was killed, and the guardian ended what it left, "
        f"arbiter pid {killed} ----",
        f"---- run {run} begins: graphs.agg:Frontend, arbiter pid {pid} ----",
        f"---- run {run} ends: dynamo down, arbiter pid {pid} ----",
    ]
