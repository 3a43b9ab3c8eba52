"""Faults injected into a host (its files, driver, variables, processes): the whole `dynamo doctor` finds each."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamo_local.cli.doctor import software
from dynamo_local.cli.doctor.reading import Place, read
from dynamo_local.core.doctor import CHECKS
from dynamo_local.core.doctor.findings import Finding, Verdict, examine
from dynamo_local.core.doctor.software import CommandOnPath, Packages, Server
from dynamo_local.state.run_id import new_run_id
from dynamo_local.system import gpu_locks
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.nvml import GIB, FakeGpu, install

DEADLINE_S = 30.0
GROUP = "sys/fs/cgroup"
FILES = {
    "dev/nvidia0": "",
    "dev/nvidia1": "",
    "dev/nvidiactl": "",
    "dev/nvidia-uvm": "",
    "proc/meminfo": f"MemAvailable: {64 * 1024**2} kB\n",
    "proc/self/cgroup": "0::/\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    f"{GROUP}/memory.max": "max\n",
    "sys/class/net/eth0": "",
    "sys/devices/system/node/node0/cpulist": "0-1023\n",
}


@dataclass
class Host:
    """A healthy host with two GPUs, of which faults can be made."""

    folder: Path
    env: dict[str, str]
    gpus: list[FakeGpu]
    ports: tuple[int, ...] = (0,)
    closing: list[socket.socket] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def paths(self, namespace: str) -> Paths:
        """With its folders, as a run makes them."""
        paths = Paths.of(namespace, self.env)
        paths.prepare()
        return paths

    def faults(self) -> set[str]:
        place = Place(self.env, self.folder / "here", self.root, ports=self.ports)
        return {each.id for each in examine(CHECKS, read(place, DEADLINE_S)) if bad(each)}


def bad(finding: Finding) -> bool:
    return finding.verdict in (Verdict.WARNING, Verdict.PROBLEM)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    env = {"PATH": os.environ["PATH"]}
    named = {"XDG_RUNTIME_DIR": "run", "HOME": "home", "DYN_LOCAL_STATE_DIR": "state", "DYN_LOCAL_LOG_DIR": "logs"}
    for name, folder in {**named, "": "here"}.items():
        (tmp_path / folder).mkdir(mode=0o700)
        env |= {name: str(tmp_path / folder)} if name else {}
    links = [["00000000:01:00.0"] * 4, ["00000000:00:00.0"] * 4]
    gpus = [FakeGpu(f"GPU-{i}", bus_id=f"00000000:0{i}:00.0", nvlink_to=links[i]) for i in range(2)]
    install(monkeypatch, gpus)
    monkeypatch.setattr(gpu_locks.lock_folders, "__kwdefaults__", {"temporary": (tmp_path,)})
    # These read the environment of the tests themselves, which may have faults of its own.
    monkeypatch.setattr(software.metadata, "packages_distributions", lambda: {"yaml": ["PyYAML"]})
    monkeypatch.setattr(software, "packages", lambda: Packages({"dynamo-local": "1.0"}))
    monkeypatch.setattr(software, "command_on_path", lambda env: CommandOnPath("/venv/bin/dynamo"))
    monkeypatch.setattr(software, "server", lambda name, env: Server("found on PATH"))
    made = Host(tmp_path, env, gpus)
    for name, text in FILES.items():
        made.write(name, text)
    (made.root / "dev" / "shm").mkdir()
    yield made
    for each in made.closing:
        each.close()


def listen(host: Host) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    host.closing.append(server)
    host.ports = (server.getsockname()[1],)


def dead_run(host: Host) -> None:
    raw = {"run_id": new_run_id(), "arbiter_pid": 2**22 + 1, "components": {}}
    host.paths("a").statefile.write_text(json.dumps(raw))


def broken_statefile(host: Host) -> None:
    host.paths("a").statefile.write_text("{")


def runtime_without_run(host: Host) -> None:
    host.paths("a")


def link_as_runtime_folder(host: Host) -> None:
    (host.folder / "elsewhere").mkdir()
    (Path(host.env["XDG_RUNTIME_DIR"]) / "dynamo").symlink_to(host.folder / "elsewhere")


def no_uvm(host: Host) -> None:
    (host.root / "dev" / "nvidia-uvm").unlink()


def sleepy_memory(host: Host) -> None:
    host.write(f"{GROUP}/memory.max", f"{2 * GIB}\n")
    host.write(f"{GROUP}/memory.current", f"{GIB + GIB // 2}\n")


def pids(host: Host) -> None:
    host.write(f"{GROUP}/pids.max", "200\n")
    host.write(f"{GROUP}/pids.current", "150\n")


def old_clock(host: Host) -> None:
    log = host.folder / "logs" / "a" / "a_arbiter.log"
    log.parent.mkdir()
    log.write_text("")
    os.utime(log, (0, 2**33))


FAULTS: dict[str, tuple[str, Callable[[Host], object]]] = {
    "a driver without a GPU": ("gpu-driver", lambda host: host.gpus.clear()),
    "no /dev/nvidia-uvm": ("gpu-nodes", no_uvm),
    "a third device file": ("gpu-lost", lambda host: host.write("dev/nvidia2", "")),
    "hidden GPUs": ("gpu-visible", lambda host: host.env.update(CUDA_VISIBLE_DEVICES="")),
    "a foreign process": ("gpu-stranger", lambda host: host.gpus[1].compute.append((os.getpid(), GIB))),
    "memory of nobody": ("gpu-stranger", lambda host: setattr(host.gpus[1], "used", 9 * GIB)),
    "MIG": ("gpu-mig", lambda host: setattr(host.gpus[1], "mig", 1)),
    "ECC errors": ("gpu-ecc", lambda host: setattr(host.gpus[0], "uncorrected_errors", 2)),
    "a row that could not be remapped": ("gpu-ecc", lambda host: setattr(host.gpus[0], "remap", (0, 1))),
    "heat": ("gpu-throttled", lambda host: setattr(host.gpus[0], "throttled", 0x40 | 0x4)),
    "a prohibited GPU": ("gpu-compute-mode", lambda host: setattr(host.gpus[0], "compute_mode", 2)),
    "four lanes": ("gpu-pcie", lambda host: setattr(host.gpus[0], "lanes", (4, 16))),
    "a link that is down": ("gpu-nvlink", lambda host: host.gpus[1].nvlink_to.pop()),
    "no fabric manager": ("gpu-fabric", lambda host: setattr(host.gpus[1], "fabric", 2)),
    "a limit of memory": ("memory", sleepy_memory),
    "half a processor": ("processors", lambda host: host.write(f"{GROUP}/cpu.max", "50000 100000\n")),
    "a limit of processes": ("processes", pids),
    "few ports": ("port-range", lambda host: host.write("proc/sys/net/ipv4/ip_local_port_range", "50000 50100\n")),
    "a clock that went back": ("clock", old_clock),
    "a proxy": ("proxy", lambda host: host.env.update(http_proxy="http://proxy:3128")),
    "a port in use": ("port", listen),
    "a long runtime folder": ("socket-path", lambda host: host.env.update(XDG_RUNTIME_DIR=f"/tmp/{'x' * 90}")),
    "a dead run": ("namespace-dead", dead_run),
    "a broken statefile": ("statefile", broken_statefile),
    "a runtime folder of nobody": ("runtime-leftovers", runtime_without_run),
    "a link as a folder": ("folder", link_as_runtime_folder),
    "a file that hides a module": ("shadowed-modules", lambda host: host.write("../here/yaml.py", "")),
    "a device that UCX cannot find": ("ucx-devices", lambda host: host.env.update(UCX_NET_DEVICES="eth7")),
    "a lease that ends soon": ("lease-ttl", lambda host: host.env.update(DYN_LEASE_TTL_S="soon")),
    "transports without GPUs": ("ucx-transports", lambda host: host.env.update(UCX_TLS="sm,tcp")),
}

IDS = {id_ for id_, _ in FAULTS.values()}
"""This machine may really have other faults, such as a small limit of open files."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_host_is_found_by_its_id(host: Host, fault: str) -> None:
    id_, inject = FAULTS[fault]
    inject(host)
    assert host.faults() & IDS == {id_}


def test_a_healthy_host_has_none_of_these_faults(host: Host) -> None:
    assert host.faults() & IDS == set()
    assert len(IDS) >= 20
