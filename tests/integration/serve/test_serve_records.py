"""The records of a running graph: etcd's keys, the statefile, environments; and what it must not."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.system.processes import start_time_s
from tests.drivers.served import COMMAND_TIMEOUT_S, DISAGG, Served
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra

SECRET = "hunter2-very-secret"
PASSED = "passed-on-purpose"
SECRET_ENV = {"SOME_SECRET_TOKEN": SECRET, "AWS_ACCESS_KEY_ID": SECRET, "WANTED_TOKEN": PASSED, "OMP_NUM_THREADS": "3"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The shipped graph, started by somebody whose environment holds secrets, one of them passed on."""
    words = ("--pass-env", "WANTED_TOKEN", "--VllmWorker.ServiceArgs.envs.MY_MARK=here")
    with Served(*words, env=SECRET_ENV) as running:
        yield running.start()


def test_etcdctl_shows_the_keys_in_the_seeds_format(served: Served) -> None:
    text = served.etcdctl("get", "--prefix", "dynamo/components/")
    found = dict(zip(*[iter(text.splitlines())] * 2, strict=True))
    endpoints = {key.removeprefix("dynamo/components/").rpartition(":")[0] for key in found}
    assert endpoints == {
        "VllmWorker/generate",
        "VllmWorker/kv_blocks",
        "VllmWorker/load_metrics",
        "PrefillWorker/canary",
        "PrefillWorker/status",
        "PrefillWorker/load_metrics",
        "Processor/chat/completions",
        "Processor/api",
        "Processor/completions",
        "Processor/texts",
    }
    for key, value in found.items():
        path, _, lease = key.rpartition(":")
        component, _, endpoint = path.removeprefix("dynamo/components/").partition("/")
        instance = json.loads(value)
        subject = instance["transport"].pop("nats_tcp")
        assert re.fullmatch(r"[0-9a-f]+", lease)
        assert instance == {
            "component": component,
            "endpoint": endpoint,
            "namespace": "dynamo",
            "lease_id": int(lease, 16),
            "transport": {},
        }
        assert re.fullmatch(rf"dynamo_{component.lower()}_[0-9a-f]{{8}}\.{endpoint}-{lease}", subject)


def test_each_key_hangs_on_its_workers_lease(served: Served) -> None:
    worker = served.worker("VllmWorker")
    lease = served.etcdctl("lease", "timetolive", worker["lease"], "--keys")
    assert "granted with TTL(10s)" in lease
    for key in worker["endpoints"]:
        assert key in lease


def test_the_statefile_says_what_runs(served: Served) -> None:
    state = served.statefile()
    status = served.status()
    assert (state["schema_version"], state["namespace"], state["run_id"]) == (1, "dynamo", status["run_id"])
    assert state["circus_endpoint"] == served.paths.circus_endpoint == status["circus_endpoint"]
    assert set(state["components"]) == {f"dynamo_{name}" for name in served.pids()}
    for row in status["workers"]:
        entry = state["components"][row["watcher_name"]]
        assert (entry["pid"], entry["lease"], entry["endpoints"]) == (row["pid"], row["lease"], row["endpoints"])
        assert entry["pid_start_time"] == pytest.approx(start_time_s(row["pid"]), abs=0.02)
        assert (entry["state"], entry["component"], entry["cwd"]) == ("ready", row["component"], str(served.cwd))
        assert entry["cmd"].endswith(f"serve_dynamo {DISAGG[0]} --service-name {row['component']}")


def test_the_statefile_says_who_holds_which_gpu(served: Served) -> None:
    state = served.statefile()
    resources = {name: entry["resources"] for name, entry in state["components"].items()}
    assert resources["dynamo_Frontend"] == {}
    held = [resources[f"dynamo_{name}"]["allocated_gpus"] for name in ("VllmWorker", "PrefillWorker")]
    assert sorted(held) == [["0"], ["1"]]
    assert state["environment"]["SYSTEM_RESOURCES"] == {"total_gpus": 8, "gpu_info": [str(n) for n in range(8)]}


def test_files_are_the_users_alone(served: Served) -> None:
    paths = served.paths
    folders = (paths.runtime.parent, paths.runtime, paths.statefile.parent, paths.logs)
    files = (paths.statefile, paths.runtime / "nats" / "token", *paths.logs.glob("*.log"))
    assert {str(path): _mode(path) for path in folders} == {str(path): 0o700 for path in folders}
    assert {str(path): _mode(path) for path in files} == {str(path): 0o600 for path in files}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_workers_get_an_allow_list_of_the_environment(served: Served) -> None:
    for name, pid in served.pids().items():
        env = _environ(pid)
        assert {"SOME_SECRET_TOKEN", "AWS_ACCESS_KEY_ID", "XDG_RUNTIME_DIR"}.isdisjoint(env), name
        assert (env["WANTED_TOKEN"], env["OMP_NUM_THREADS"]) == (PASSED, "3"), name
        assert (env["DYN_NAMESPACE"], env["GRPC_ENABLE_FORK_SUPPORT"]) == ("dynamo", "0"), name


def test_envs_of_a_service_reach_its_workers_only(served: Served) -> None:
    marks = {name: _environ(pid).get("MY_MARK") for name, pid in served.pids().items()}
    assert marks == {"Frontend": None, "VllmWorker": "here", "PrefillWorker": None}
    assert served.worker("VllmWorker")["gpus"] != []


def test_all_workers_are_spawned_at_once(served: Served) -> None:
    """Order governs readiness, not spawning."""
    started = [entry["started_at"] for entry in served.statefile()["components"].values()]
    assert max(started) - min(started) < 0.5


def _environ(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def test_nothing_secret_is_shown_or_written(served: Served) -> None:
    token = (served.paths.runtime / "nats" / "token").read_text().strip()
    shown = {f"argv of {pid}": line for pid, line in served.processes()}
    shown |= {path.name: path.read_text(errors="replace") for path in served.paths.logs.glob("*.log*")}
    shown["statefile"] = served.paths.statefile.read_text()
    for name in served.pids():
        shown[f"options {name}"] = served.cli("ctl", "options", f"dynamo_{name}").stdout
    shown["status"] = served.cli("status", "--json").stdout
    shown["dry run"] = served.cli(*served.serve_words("--dry-run")).stdout
    shown["keys"] = served.etcdctl("get", "--prefix", "")
    assert len(shown) > 20
    assert [where for where, text in shown.items() for secret in (token, SECRET, PASSED) if secret in text] == []
    assert "WANTED_TOKEN=****" in shown["options VllmWorker"]


def test_stock_circusctl_masks_options_too(served: Served) -> None:
    for words in (("options", "dynamo_VllmWorker"), ("get", "dynamo_VllmWorker", "env")):
        shown = circusctl(served, *words).stdout
        assert "WANTED_TOKEN" in shown
        assert PASSED not in shown


def circusctl(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("circusctl") or str(Path(sys.executable).with_name("circusctl"))
    return subprocess.run(
        [binary, "--endpoint", served.paths.circus_endpoint, *words],
        env=served.env,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )


def test_embedded_servers_listen_on_loopback_only(served: Served) -> None:
    pids = [pid for name in ("etcd", "nats") if (pid := served.server_pid(name))] + [served.pids()["Frontend"]]
    listening = {address for pid in pids for address in _listening(pid)}
    assert len(pids) == 3
    assert listening
    assert {address for address in listening if not address.startswith(("0100007F", "unix"))} == set()


def _listening(pid: int) -> Iterator[str]:
    """Hexadecimal addresses of the process's listening TCP sockets, of proc_net_tcp(5); IPv6 ones included."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(link)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield fields[1]


@pytest.mark.full
def test_external_servers_are_used_and_left_without_a_key(etcd_server: RealEtcd, nats_server: RealNats) -> None:
    env = {"ETCD_ENDPOINTS": etcd_server.endpoint, "NATS_SERVER": nats_server.address}
    with Served(namespace="external", env=env).started() as served:
        keys = served.keys()
        shown = json.dumps(
            [served.status(), served.statefile(), served.cli("ctl", "options", "external_Frontend").stdout]
        )
        watchers = served.cli("ctl", "--namespace", "external", "list").stdout
        logs = "".join(path.read_text() for path in served.paths.logs.glob("*.log"))
        served.down()
        left = _keys(etcd_server, "external/")
    assert len(keys) > 6
    assert nats_server.token not in shown + logs
    assert nats_server.url in shown
    assert "nats" not in watchers
    assert left == ""


def _keys(etcd: RealEtcd, prefix: str) -> str:
    etcdctl = etcd.spec.binary.path.with_name("etcdctl")
    words: list[Any] = [etcdctl, "--endpoints", etcd.endpoint, "get", "--prefix", prefix, "--keys-only"]
    return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True).stdout
