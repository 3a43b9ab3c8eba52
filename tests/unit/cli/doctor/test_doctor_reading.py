"""The reader of `dynamo doctor`, on fake files, a fake driver, and this host."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from dynamo_local.cli.doctor import gpus, host, runs, software
from dynamo_local.cli.doctor.model import model_folder
from dynamo_local.cli.doctor.reading import Place, Read, read, reads
from dynamo_local.core.doctor import CHECKS
from dynamo_local.core.doctor.findings import Finding, Verdict, examine, facts_of
from dynamo_local.core.doctor.gpus import Driver
from dynamo_local.core.doctor.host import Memory, Rdma
from dynamo_local.core.doctor.runs import Orphans, SeenRun
from dynamo_local.core.types import Missing
from dynamo_local.state.run_id import new_run_id
from dynamo_local.system.gpu_locks import GpuLocks, LockHolder
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.nvml import GIB, FakeGpu, install

DEADLINE_S = 10.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The variables of a user of whom nothing is on this host."""
    named = {"XDG_RUNTIME_DIR": "run", "HOME": "home", "DYN_LOCAL_STATE_DIR": "state", "DYN_LOCAL_LOG_DIR": "logs"}
    for folder in named.values():
        (tmp_path / folder).mkdir(mode=0o700)
    return {"PATH": os.environ["PATH"], **{name: str(tmp_path / folder) for name, folder in named.items()}}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(findings: tuple[Finding, ...], id_: str) -> list[tuple[Verdict, str]]:
    return [(each.verdict, each.subject) for each in findings if each.id == id_]


# --- all of it -----------------------------------------------------------------------------------


def test_this_host_is_read_whole(env: dict[str, str], tmp_path: Path) -> None:
    """Each fact that a check takes is read, and none of the reads fails."""
    place = Place(env, tmp_path)
    facts = read(place, 60.0)
    assert {name for check in CHECKS for name in facts_of(check)} <= facts.keys()
    of_gpus = {"gpus", "visible", "gpu_process_users", "gpu_users"}  # there may be no driver
    assert {
        name: fact.reason for name, fact in facts.items() if isinstance(fact, Missing) and name not in of_gpus
    } == {}


def test_a_read_that_hangs_costs_its_own_facts_only() -> None:
    ends = threading.Event()
    try:
        facts = asyncio.run(Read(("mount", "files"), ends.wait).facts(0.05))
    finally:
        ends.set()
    assert facts.keys() == {"mount", "files"}
    assert all("has not returned within 0.05 s" in fact.reason for fact in facts.values())


def test_a_read_that_fails_says_why() -> None:
    def work() -> None:
        raise PermissionError(13, "Permission denied", "/dev/shm")

    (fact,) = asyncio.run(Read(("shared_memory",), work).facts(1.0)).values()
    assert "Permission denied: '/dev/shm'" in fact.reason


def test_every_read_has_its_own_thread(env: dict[str, str]) -> None:
    """Else one that hangs would keep others waiting."""
    place = Place(env, Path("/"), models=("/a", "/b"))
    assert len(reads(place)) <= 40


# --- GPUs ----------------------------------------------------------------------------------------


def test_a_driver_that_hangs_is_a_problem_and_the_gpus_are_not_checked(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, [FakeGpu("GPU-a")])
    fake.answers.clear()
    root = write(tmp_path / "root", {"dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    try:
        findings = examine(CHECKS, read(Place(env, tmp_path, root=root), 1.0))
    finally:
        fake.answers.set()
    assert found(findings, "gpu-driver") == [(Verdict.PROBLEM, "")]
    assert found(findings, "gpu-mig") == [(Verdict.NOT_CHECKED, "")]


def test_the_driver_is_read_and_what_it_does_not_say_is_missing(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, [FakeGpu("GPU-a", used=GIB, compute=[(os.getpid(), GIB)], nvlink_to=["switch"] * 18)])
    facts = gpus.nvml({**env, "CUDA_VISIBLE_DEVICES": "3"})
    (gpu,) = facts["gpus"]
    assert (facts["driver"].error, gpu.nvlinks) == (None, 18)
    assert (gpu.mig, gpu.pcie, gpu.fabric, facts["driver"].cuda) == (False, (16, 16), 0, (12, 8))
    assert facts["gpu_process_users"] == {os.getpid(): psutil.Process().username()}
    assert "there is no GPU '3'" in facts["visible"].error


def test_without_a_driver_the_error_is_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [])
    facts = gpus.nvml({})
    assert facts["driver"] == Driver(
        error="the NVIDIA driver reports no GPU; on a machine without one use --gpus sim:8"
    )
    assert isinstance(facts["gpus"], Missing)


def test_device_files_and_numa_nodes_are_read_from_files(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "dev/nvidia0": "",
            "dev/nvidiactl": "",
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:02:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:02:00.0/class": "0x068000\n",
            "sys/devices/system/node/node0/cpulist": "0-2,8\n",
            "sys/devices/system/node/node1/cpulist": "\n",
        },
    )
    files = gpus.device_files(root)
    assert (files.pci, files.gpu_nodes, "/dev/nvidia-uvm" in files.nodes) == (
        ("0000:01:00.0",),
        ["/dev/nvidia0"],
        False,
    )
    assert gpus.numa_cpus(root) == {0: {0, 1, 2, 8}, 1: frozenset()}


def test_a_gpu_lock_of_a_dead_arbiter_is_seen(env: dict[str, str], tmp_path: Path) -> None:
    env["DYN_GPU_LOCK_DIR"] = str(tmp_path / "locks")
    locks = GpuLocks(tmp_path / "locks")
    locks.acquire(["GPU-a"], LockHolder("old", "old_VllmWorker", 2**22 + 1))  # above the largest pid
    locks.acquire(["GPU-b"], LockHolder("new", "new_VllmWorker", os.getpid()))
    try:
        seen = {
            lock.uuid: (lock.namespace, lock.alive) for lock in gpus.gpu_locks(env) if lock.uuid in ("GPU-a", "GPU-b")
        }
    finally:
        locks.close()
    assert seen == {"GPU-a": ("old", False), "GPU-b": ("new", True)}


# --- the host ------------------------------------------------------------------------------------

MEMINFO = {"proc/meminfo": "MemTotal: 1 kB\nMemAvailable: 4096 kB\n"}


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/user.slice/run.scope\n",
            "sys/fs/cgroup/user.slice/memory.max": "3000\n",
            "sys/fs/cgroup/user.slice/memory.current": "1000\n",
            "sys/fs/cgroup/user.slice/run.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/run.scope/memory.current": "10\n",
            "sys/fs/cgroup/user.slice/run.scope/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/run.scope/pids.max": "100\n",
            "sys/fs/cgroup/user.slice/run.scope/pids.current": "90\n",
        },
    )
    assert host.memory(root) == Memory(4096 * 1024, 2000)
    assert host.cpu_quota(root) == 1.5
    assert host.limits(root).processes_left == 10


def test_control_groups_of_version_1_are_read_within_a_container(tmp_path: Path) -> None:
    """The file names the group on the host, which the container does not see."""
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert host.memory(root) == Memory(4096 * 1024, 4000)
    assert host.cpu_quota(root) is None


def test_rdma_devices_are_read_from_files(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/class/infiniband/mlx5_0": "", "sys/class/net/eth0": "", "dev/infiniband/uverbs0": ""})
    assert host.rdma(root) == Rdma(("mlx5_0",), ())
    assert host.network_devices(root) == {"mlx5_0", "eth0"}


def test_folders_that_cannot_be_used_say_why(env: dict[str, str], tmp_path: Path) -> None:
    assert {name: host.folder(name, env).fault for name in host.FOLDERS} == dict.fromkeys(host.FOLDERS)
    (tmp_path / "run" / "dynamo").symlink_to(tmp_path / "home")
    assert "is a link" in (host.folder("runtime", env).fault or "")
    env["DYN_LOCAL_STATE_DIR"] = str(write(tmp_path, {"file": ""}) / "file" / "below")
    assert "is not a folder" in (host.folder("state", env).fault or "")


def test_a_file_of_the_future_and_a_step_of_the_clock_are_seen(env: dict[str, str], tmp_path: Path) -> None:
    boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    worker = {"pid_start_time": 100.0, "started_at": boot_s + 100.0 - 7200.0}
    prewarmed = {"pid_start_time": 50.0, "started_at": boot_s + 9000.0}
    statefile = Paths.of("a", env).statefile
    statefile.write_text(json.dumps({"components": {"W": worker, "V": prewarmed, "X": {}}}))
    os.utime(statefile, (0, time.time() + 5000))
    clock = host.clock(env)
    assert [path for path, _ in clock.future] == [str(statefile)]
    assert clock.steps["a"] == pytest.approx(7200.0, abs=5.0)


@pytest.mark.parametrize(
    ("variables", "exempt"),
    [
        ({"http_proxy": "http://me:pw@proxy:3128"}, False),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "localhost,127.0.0.1"}, True),
    ],
)
def test_a_proxy_is_shown_without_its_password(env: dict[str, str], variables: dict[str, str], exempt: bool) -> None:
    network = host.network(Path("/"), env | variables)
    assert network.exempt == exempt
    assert "pw" not in "".join(network.proxies.values())
    assert network.proxies


# --- runs ----------------------------------------------------------------------------------------


def left(env: dict[str, str], namespace: str, text: str | None = None) -> Paths:
    """The statefile and the runtime folder of a killed arbiter."""
    paths = Paths.of(namespace, env)
    paths.prepare()
    paths.statefile.write_text(text or json.dumps({"run_id": new_run_id(), "arbiter_pid": 2**22 + 1, "components": {}}))
    return paths


def test_a_dead_run_and_a_broken_statefile_are_two_findings(env: dict[str, str]) -> None:
    left(env, "dead")
    left(env, "broken", "{")
    (dead,) = runs.runs(env)
    assert (dead.namespace, dead.state) == ("dead", "dead")
    assert {each.namespace: each.fault is None for each in runs.statefiles(env)} == {"dead": True, "broken": False}
    assert runs.leftover_folders(env) == ()


def test_a_runtime_folder_without_a_statefile_is_left_over(env: dict[str, str]) -> None:
    left(env, "gone").statefile.unlink()
    assert runs.leftover_folders(env) == (str(Paths.of("gone", env).runtime),)
    assert runs.runs(env) == ()


def test_a_process_of_a_run_without_statefile_is_an_orphan(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {
        "DYN_WATCHER_NAME": "a_VllmWorker",
        "DYN_NAMESPACE": "a",
        "DYN_STATEFILE": str(tmp_path / "other" / "a.json"),
    }
    command = ["/bin/sh", "-c", "echo; read line"]
    with psutil.Popen(command, env=marks, start_new_session=True, stdin=PIPE, stdout=PIPE) as orphan:
        try:
            orphan.stdout.readline()  # it runs: the kernel shows an environment only then
            facts = runs.our_processes(env)
        finally:
            orphan.kill()
    assert facts["our_processes"][orphan.pid] == "a_VllmWorker"
    mine = [each for each in facts["orphans"] if each.state_dir == str(tmp_path / "other")]
    assert mine == [Orphans("a", str(tmp_path / "other"), (f"a_VllmWorker (pid {orphan.pid})",))]


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        taken = runs.listeners((number,))
        (stranger,) = runs.ports((number,), taken, {})
        (ours,) = runs.ports((number,), taken, {os.getpid(): "dynamo_Frontend"})
    assert f"(pid {os.getpid()})" in (stranger.holder or "")
    assert (stranger.ours, ours.ours, ours.holder) == (False, True, f"dynamo_Frontend (pid {os.getpid()})")
    assert runs.listeners((number,)) == {}


def test_runs_are_seen_as_ls_sees_them(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    left(env, "a")
    assert [type(each) for each in runs.runs(env)] == [SeenRun]


# --- software ------------------------------------------------------------------------------------


def test_a_file_that_hides_a_module_is_seen(tmp_path: Path) -> None:
    write(tmp_path, {"yaml.py": "", "types.py": "", "graphs.py": "", "numpy/data.csv": "", "click/__init__.py": ""})
    assert [Path(path).name for path in software.shadows(tmp_path)] == ["click", "types.py", "yaml.py"]


def test_another_dynamo_on_path_is_seen(env: dict[str, str], tmp_path: Path) -> None:
    program = write(tmp_path, {"bin/dynamo": "#!/usr/bin/python3\n"}) / "bin" / "dynamo"
    program.chmod(0o755)
    seen = software.command_on_path({"PATH": str(program.parent)})
    assert (seen.path, seen.ours) == (str(program), False)
    assert software.command_on_path({"PATH": str(tmp_path)}).path is None


def test_a_server_that_does_not_answer_is_a_fault_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert software.server("etcd", {"ETCD_ENDPOINTS": f"http://127.0.0.1:{port}"}).fault is None
    fault = software.server("nats-server", {"NATS_SERVER": f"nats://me:secret@127.0.0.1:{port}"}).fault or ""
    assert "cannot be reached" in fault
    assert "secret" not in fault


def test_unmet_requirements_are_found_all_the_way_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, requires in (
        ("dynamo_local", "1.0", ["click>=8", "absent>=2", 'vllm>=0.32; extra == "vllm"', 'old; python_version < "3"']),
        ("click", "8.1", ["below<2"]),
        ("below", "2.0", []),
    ):
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
        write(tmp_path, {f"{name}-{version}.dist-info/METADATA": "Metadata-Version: 2.1\n" + "\n".join(lines) + "\n"})
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    packages = software.packages()
    assert packages.vllm_minimum == "0.32"
    assert [(each.package, each.requirement, each.found, each.ours) for each in packages.unmet] == [
        ("dynamo-local", "absent>=2", None, True),
        ("click", "below<2", "2.0", False),
    ]


# --- a model's folder ----------------------------------------------------------------------------


def safetensors(data: bytes, told: int | None = None) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, told or len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound folder with two files of weights."""
    from dynamo_local.components.text.tokenizer import TINY_FOLDER

    folder = tmp_path / "model"
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    write(
        folder,
        {
            "config.json": json.dumps(CONFIG),
            "model.safetensors.index.json": json.dumps(index),
            **{name: (TINY_FOLDER / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")},
        },
    )
    for name in ("m-1.safetensors", "m-2.safetensors"):
        (folder / name).write_bytes(safetensors(b"1234"))
    return folder


def model_faults(folder: Path | str, env: dict[str, str]) -> set[tuple[str, Verdict]]:
    facts = {"models": (model_folder(str(folder), env),)}
    checks = [check for check in CHECKS if facts_of(check) == ("models",)]
    return {(each.id, each.verdict) for each in examine(checks, facts) if each.verdict is not Verdict.OK}


def test_a_sound_model_has_no_finding(model: Path, env: dict[str, str]) -> None:
    assert model_faults(model, env) == set()


def _cut(model: Path) -> None:
    os.truncate(model / "m-2.safetensors", 20)


def _short(model: Path) -> None:
    (model / "m-2.safetensors").write_bytes(safetensors(b"1234", told=400))


def _pointer(model: Path) -> None:
    (model / "m-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _lost(model: Path) -> None:
    (model / "m-2.safetensors").unlink()


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _half_a_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["Ll')


def _no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _bad_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def _no_template(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")


def _only_gguf(model: Path) -> None:
    for path in model.glob("*safetensors*"):
        path.unlink()
    (model / "m.gguf").write_text("")


@pytest.mark.parametrize(
    ("spoil", "id_"),
    [
        (_cut, "model-weights"),
        (_short, "model-weights"),
        (_pointer, "model-weights"),
        (_lost, "model-weights"),
        (_only_gguf, "model-weights"),
        (_no_config, "model-folder"),
        (_half_a_config, "model-config"),
        (_no_tokenizer, "model-tokenizer"),
        (_bad_tokenizer, "model-tokenizer"),
        (_no_template, "model-chat-template"),
    ],
)
def test_a_fault_of_a_model_is_found(model: Path, env: dict[str, str], spoil: Any, id_: str) -> None:
    spoil(model)
    assert {found for found, _ in model_faults(model, env)} == {id_}


def test_the_model_of_the_simulated_engine_has_no_fault(env: dict[str, str]) -> None:
    assert model_faults("sim-tiny", env) == set()


def test_the_repair_is_the_one_for_this_model(tmp_path: Path, env: dict[str, str]) -> None:
    for given, repair in (("Org/Model", "hf download Org/Model"), ("a.gguf", "dynamo serve -- llama-server -m a.gguf")):
        facts = {"models": (model_folder(given, {**env, "HF_HOME": str(tmp_path)}),)}
        found = {
            each.id: each for each in examine([check for check in CHECKS if facts_of(check) == ("models",)], facts)
        }
        assert found["model-folder"].repair.startswith(repair)


def test_what_is_no_folder_is_one_finding(tmp_path: Path, env: dict[str, str]) -> None:
    assert model_faults(tmp_path / "nope", env) == {("model-folder", Verdict.PROBLEM)}
    assert model_faults(write(tmp_path, {"m.gguf": ""}) / "m.gguf", env) == {("model-folder", Verdict.PROBLEM)}
