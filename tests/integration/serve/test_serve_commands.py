"""Commands as processes against a running graph: status, logs, ls, events, ctl, down, and a second serve."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY, EXIT_NOT_RUNNING
from tests.drivers.scaled import scale
from tests.drivers.served import AGG, Served, asking, expected, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

WORKERS = ["dynamo_Frontend", "dynamo_VllmWorker", "dynamo_PrefillWorker"]
LOAD = {
    "request_active_slots",
    "request_total_slots",
    "kv_active_blocks",
    "kv_total_blocks",
    "num_requests_waiting",
    "gpu_cache_usage_perc",
    "gpu_prefix_cache_hit_rate",
}


def test_bench_sends_its_load_to_the_graph(disagg: Served) -> None:
    words = ("--requests", "6", "--isl", "40", "--osl", "8", "--concurrency", "2", "--json")
    found = json.loads(disagg.ok("bench", *words))
    assert (found["completed"], found["failed"], found["model"]) == (6, 0, "sim-tiny")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (240, 48)
    assert found["mean_ttft_ms"] > 0


def test_status_as_json_and_as_a_table(disagg: Served) -> None:
    until(lambda: disagg.worker("VllmWorker")["load"] and disagg.worker("PrefillWorker")["load"])
    done = disagg.cli("status", "--json")
    graph = json.loads(done.stdout)
    for key in ("namespace", "run_id", "circus_endpoint", "etcd_endpoints", "nats_server", "frontend_url"):
        assert isinstance(graph[key], str), key
    assert [worker["watcher_name"] for worker in graph["workers"]] == WORKERS
    for worker in graph["workers"]:
        assert {"watcher_name", "component", "state", "pid", "gpus", "lease", "endpoints", "uptime_s", "load"} <= set(
            worker
        )
        assert worker["state"] == "ready"
        assert worker["uptime_s"] > 0
    loads = {worker["component"]: worker["load"] for worker in graph["workers"]}
    for component in ("VllmWorker", "PrefillWorker"):
        assert set(loads[component]) >= LOAD, component
    table = disagg.cli("status").stdout
    assert disagg.url in table
    for name in WORKERS:
        assert any(line.startswith(name) and " ready " in line for line in table.splitlines()), table


@pytest.mark.alone
@pytest.mark.timing
def test_status_is_quick(disagg: Served) -> None:
    took_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        assert disagg.cli("status").returncode == 0
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 0.4, took_s


def test_circusctl_lists_and_shows(disagg: Served) -> None:
    names = [*WORKERS, "dynamo_etcd", "dynamo_nats", "dynamo_guardian"]
    listed = disagg.cli("ctl", "list").stdout
    status = disagg.cli("ctl", "status").stdout
    numbers = [disagg.cli("ctl", "numprocesses", name).stdout.strip() for name in names[:2]]
    ours = disagg.cli("ctl", "dynamo_status").stdout
    options = disagg.cli("ctl", "--namespace", "dynamo", "options", "dynamo_VllmWorker").stdout
    assert set(listed.strip().split(",")) == {name.lower() for name in names}
    assert {line.partition(":")[0]: line.rpartition(" ")[2] for line in status.splitlines()} == dict.fromkeys(
        names, "active"
    )
    assert numbers == ["1", "1"]
    assert f"dynamo_VllmWorker: ready pid={disagg.pids()['VllmWorker']}" in ours
    assert "numprocesses: 1" in options


def test_logs_of_all_and_of_one(disagg: Served) -> None:
    everything = disagg.cli("logs", "--lines", "3").stdout
    one = disagg.cli("logs", "VllmWorker").stdout
    full = disagg.cli("logs", "dynamo_VllmWorker", "--namespace", "dynamo").stdout
    wrong = disagg.cli("logs", "Vllm")
    assert {line.split("]")[0].strip("[") for line in everything.splitlines()} >= {*WORKERS, "dynamo_etcd"}
    assert one
    assert one == full
    assert all(line.startswith("[dynamo_VllmWorker] ") for line in one.splitlines())
    assert "ready: lease" in one
    assert (wrong.returncode, "VllmWorker" in wrong.stderr) == (EXIT_BAD_INPUT, True)


def test_following_commands_end_quietly_at_ctrl_c(disagg: Served) -> None:
    logs = disagg.paths.logs
    for words, change in (
        (("logs", "-f", "--lines", "1"), lambda: _append(logs / "dynamo_VllmWorker.log", "a new line\n")),
        (("status", "--watch", "--json"), lambda: None),
    ):
        process = disagg.popen(*words)
        until(lambda: len(disagg.foreground_output().splitlines()) >= 1, what=disagg.foreground_output)
        shown = len(disagg.foreground_output().splitlines())
        change()
        until(lambda shown=shown: len(disagg.foreground_output().splitlines()) > shown, what=disagg.foreground_output)
        process.send_signal(signal.SIGINT)
        assert disagg.reap_foreground() == 0
        assert "Traceback" not in disagg.foreground_output()


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_second_serve_says_who_runs_the_namespace(disagg: Served) -> None:
    before = disagg.pids()
    foreground = disagg.cli(*disagg.serve_words())
    detached = disagg.cli(*disagg.serve_words("--detach"))
    for done in (foreground, detached):
        assert done.returncode == EXIT_BUSY, done
        assert f"pid {disagg.status()['arbiter_pid']}" in done.stderr
        assert "dynamo down" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert disagg.pids() == before


def test_dry_run_prints_the_plan_beside_a_running_graph(disagg: Served) -> None:
    before = disagg.processes()
    done = disagg.cli(*disagg.serve_words("--dry-run", "--json", "--VllmWorker.ServiceArgs.workers=2"))
    plan = json.loads(done.stdout)
    assert [watcher["watcher_name"] for watcher in plan["watchers"]] == [
        "dynamo_Frontend",
        "dynamo_VllmWorker",
        "dynamo_VllmWorker_1",
        "dynamo_PrefillWorker",
    ]
    assert len({tuple(watcher["gpu_uuids"]) for watcher in plan["watchers"] if watcher["gpus"]}) == 3
    assert disagg.processes() == before


@pytest.mark.full
async def test_two_namespaces_run_side_by_side(disagg: Served) -> None:
    before = disagg.paths.statefile.read_text(), disagg.pids()
    # XDG_RUNTIME_DIR, HOME and all commands are those of the first graph.
    with Served(target=AGG, namespace="other", beside=disagg).started() as other:
        assert other.url != disagg.url
        assert set(other.pids()) == {"Frontend", "VllmWorker"}
        assert all(key.startswith("other/") for key in other.keys(""))
        for served, word in ((disagg, "first"), (other, "second")):
            async with served.client() as client:
                answer = await client.chat.completions.create(**asking(f"I am the {word}.", 8))
            assert answer.choices[0].message.content == expected(f"I am the {word}.", 8)[0]
        assert json.loads(disagg.cli("status", "--json", "-n", "other").stdout)["namespace"] == "other"
        assert "other_VllmWorker" in disagg.cli("ctl", "-n", "other", "status").stdout
        assert "[other_VllmWorker]" in disagg.cli("logs", "-n", "other", "VllmWorker").stdout
        assert other.down("--timeout", "20").stdout.splitlines()[-1] == "other: down"
    assert (disagg.paths.statefile.read_text(), disagg.pids()) == before


def test_commands_without_a_graph_say_so(disagg: Served) -> None:
    for words in (("status",), ("down",), ("ctl", "list"), ("logs",)):
        done = disagg.cli(words[0], "--namespace", "nobody", *words[1:])
        assert done.returncode == EXIT_NOT_RUNNING, (words, done)
        assert "nobody" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def _listed(served: Served) -> dict[str, dict[str, object]]:
    """`dynamo ls --json`, by namespace."""
    return {run["namespace"]: run for run in json.loads(served.cli("ls", "--json").stdout)}


@pytest.mark.full
def test_ls_lists_a_graph_that_runs_and_one_whose_arbiter_was_killed(disagg: Served) -> None:
    with Served("--on-arbiter-death", "keep", target=AGG, namespace="other", beside=disagg).started() as other:
        both = _listed(disagg)
        table = disagg.cli("ls").stdout.splitlines()
        other.kill_arbiter(guardian=True)
        killed = _listed(disagg)["other"]
        other.down()
        left = _listed(disagg)
    run = both["dynamo"]
    assert (run["state"], run["workers_ready"], run["workers"], run["gpus"]) == ("ready", 3, 3, ["0", "1"])
    assert (run["frontend_url"], run["run_id"]) == (disagg.url, disagg.status()["run_id"])
    assert [line.split()[0] for line in table] == ["NAMESPACE", "dynamo", "other"]
    assert disagg.url in table[1]
    assert (killed["state"], killed["workers"], killed["gpus"]) == ("kept", 2, ["0"])
    assert "2 workers live on" in str(killed["note"])
    assert set(left) == {"dynamo"}


def test_logs_of_a_component_follow_workers_that_come_later(disagg: Served) -> None:
    process = disagg.popen("logs", "VllmWorker", "-f", "--since", "1h")
    try:
        until(lambda: "[dynamo_VllmWorker] " in disagg.foreground_output(), what=disagg.foreground_output)
        scale(disagg, "VllmWorker", "+1")
        until(lambda: "[dynamo_VllmWorker_1] " in disagg.foreground_output(), 60.0, what=disagg.foreground_output)
    finally:
        process.send_signal(signal.SIGINT)
    assert disagg.reap_foreground() == 0
    until(lambda: disagg.states().get("VllmWorker_1") == "ready", 60.0, what=disagg.states)
    whole = disagg.cli("logs", "VllmWorker", "-l", "1000").stdout.splitlines()
    scale(disagg, "VllmWorker", "1")
    until(lambda: "VllmWorker_1" not in disagg.states(), 60.0, what=disagg.states)
    assert {line.split()[0] for line in disagg.foreground_output().splitlines()} == {
        "[dynamo_VllmWorker]",
        "[dynamo_VllmWorker_1]",
    }
    times = [" ".join(line.split()[1:3]) for line in whole if line.split()[1].startswith("20")]
    assert times == sorted(times)
    assert {line.split()[0] for line in whole} == {"[dynamo_VllmWorker]", "[dynamo_VllmWorker_1]"}


@pytest.mark.full
def test_a_second_run_begins_its_logs_anew_and_the_first_one_s_are_still_shown() -> None:
    with Served(target=AGG).started() as served:
        first = served.status()
        served.kill_arbiter()
        until(lambda: not served.paths.statefile.exists(), 30.0, what=served.processes)
        for command in ("status", "down"):
            said = served.cli(command).stderr
            assert f"its arbiter (pid {first['arbiter_pid']}) was killed by SIGKILL at " in said
            assert f"the guardian ended its {len(first['workers'])} workers, etcd and NATS. The log is /" in said
        assert "ended" in served.cli("ls").stdout
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
        f"---- run {before} ends: its arbiter was killed by SIGKILL, and the guardian ended what it left, "
        f"arbiter pid {killed} ----",
        f"---- run {run} begins: graphs.agg:Frontend, arbiter pid {pid} ----",
        f"---- run {run} ends: dynamo down, arbiter pid {pid} ----",
    ]
