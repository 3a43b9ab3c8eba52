"""Reads all facts of a host at once, each with a deadline.

A read that fails or hangs costs its own facts only: they are `Missing`, with the reason, and their checks are `not
checked`. Reads run in daemon threads, so that the command can end while one hangs in a driver or on a dead mount.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_local.cli.doctor import gpus, host, model, runs, software
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.core.doctor.gpus import NO_GPU, Driver, GpuUsers
from dynamo_local.core.doctor.model import ModelFolder
from dynamo_local.core.doctor.runs import GpuLock
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError
from dynamo_local.system.executors import DaemonExecutor

FRONTEND_PORTS: tuple[int, ...] = (FrontendConfig.model_fields["port"].default,)
READS = DaemonExecutor("doctor", threads=32)


@dataclass(frozen=True, slots=True)
class Place:
    """The host (`root` is `/`), as this shell (`env`, `folder`) sees it, with these models and ports."""

    env: Mapping[str, str]
    folder: Path
    root: Path = Path("/")
    models: tuple[str, ...] = ()
    ports: tuple[int, ...] = FRONTEND_PORTS


@dataclass(frozen=True, slots=True)
class Read:
    """One read: the names of its facts, and the function that returns the fact, or all of them by name."""

    names: tuple[str, ...]
    work: Callable[[], Any]

    async def facts(self, deadline_s: float) -> dict[str, Any]:
        """The facts, or `Missing` for each."""
        try:
            found = await READS.run(self.work, deadline_s, what=f"reading {self.names[0]}")
        except DynamoError as error:
            return dict.fromkeys(self.names, Missing(str(error)))
        except Exception as error:  # a doctor says what it could not read, and goes on
            return dict.fromkeys(self.names, Missing(f"{self.names[0]}: {type(error).__name__}: {error}"))
        return found if len(self.names) > 1 else {self.names[0]: found}


def reads(place: Place) -> tuple[Read, ...]:
    """All reads of that place."""
    env, root = place.env, place.root

    def one(name: str, work: Callable[..., Any], *args: Any) -> Read:
        return Read((name,), partial(work, *args))

    return (
        Read(("driver", "gpus", "visible", "gpu_process_users"), partial(gpus.nvml, env)),
        Read(("our_processes", "orphans"), partial(runs.our_processes, env)),
        one("device_files", gpus.device_files, root),
        one("numa_cpus", gpus.numa_cpus, root),
        one("gpu_locks", gpus.gpu_locks, env),
        one("allowed_cpus", host.allowed_cpus),
        one("cpu_quota", host.cpu_quota, root),
        one("memory", host.memory, root),
        one("shared_memory", host.shared_memory, root),
        one("limits", host.limits, root),
        one("rdma", host.rdma, root),
        one("network_devices", host.network_devices, root),
        one("clock", host.clock, env),
        one("network", host.network, root, env),
        *(one(f"folder:{name}", host.folder, name, env) for name in host.FOLDERS),
        one("listeners", runs.listeners, place.ports),
        one("runs", runs.runs, env),
        one("statefiles", runs.statefiles, env),
        one("leftover_folders", runs.leftover_folders, env),
        one("control_socket", runs.control_socket, env),
        one("python", software.python),
        one("packages", software.packages),
        one("command_on_path", software.command_on_path, env),
        one("shadows", software.shadows, place.folder),
        one("etcd", software.server, "etcd", env),
        one("nats", software.server, "nats-server", env),
        one("compilers", software.compilers, env),
        *(one(f"model:{given}", model.model_folder, given, env) for given in place.models),
    )


def read(place: Place, deadline_s: float) -> dict[str, Any]:
    """The facts that the checks take, by name."""

    async def all_at_once() -> list[dict[str, Any]]:
        return await asyncio.gather(*(each.facts(deadline_s) for each in reads(place)))

    found = {name: fact for facts in asyncio.run(all_at_once()) for name, fact in facts.items()}
    return found | _composed(place, found)


def _composed(place: Place, found: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that need several reads."""
    driver = found["driver"]
    if isinstance(driver, Missing):
        driver = Driver(error=driver.reason)
    composed = {
        "environment": place.env,
        "driver": driver,
        "gpu_users": _if_read(_gpu_users, *(found[n] for n in ("our_processes", "gpu_process_users", "gpu_locks"))),
        "ports": _if_read(partial(runs.ports, place.ports), found["listeners"], found["our_processes"]),
        "folders": {name: found[f"folder:{name}"] for name in host.FOLDERS},
        "models": tuple(_model(given, found[f"model:{given}"]) for given in place.models),
    }
    files = found["device_files"]
    if driver.error is not None and not isinstance(files, Missing) and not files.any:
        composed |= dict.fromkeys(("gpus", "visible"), Missing(NO_GPU))
    return composed


def _if_read(compose: Callable[..., Any], *facts: Any) -> Any:
    """`compose(*facts)`, or the first of them that is missing."""
    return next((fact for fact in facts if isinstance(fact, Missing)), None) or compose(*facts)


def _gpu_users(ours: Mapping[int, str], users: Mapping[int, str], locks: Sequence[GpuLock]) -> GpuUsers:
    return GpuUsers(ours, users, {lock.uuid: lock.holder for lock in locks})


def _model(given: str, fact: Any) -> Any:
    """A model's folder that could not be read within the deadline."""
    return ModelFolder(given, fault=fact.reason) if isinstance(fact, Missing) else fact
