"""Of what kind a spare is: an engine, and the environment in which its modules were imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from dynamo_local.arbiter.deployment import Launcher
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.gpus import GpuDevice, cuda_visible_devices
from dynamo_local.core.prewarmed import ROOM, ROOM_BYTES, EngineName, early, engine_of
from dynamo_local.core.secrets import is_secret_variable
from dynamo_local.core.types import ServiceSpec

MODULE = "dynamo_local.worker.prewarmed"
WORDS_ROOM = 160
"""Padding behind the command line, so that `ps` can show the worker's."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a spare has that cannot be given to it later. `env` is the early part of a worker's environment."""

    engine: EngineName
    cwd: str
    env: tuple[tuple[str, str], ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """The command of such a spare."""
        return (sys.executable, "-m", MODULE, self.engine, "." * WORDS_ROOM)

    def environment(self, marks: Mapping[str, str], visible: str | None, log_level: str | None) -> dict[str, str]:
        """Of a spare of this kind; `visible` are the devices of the run (None: the user pins)."""
        env = {**dict(self.env), **marks, ROOM: "." * ROOM_BYTES}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        if log_level is not None:
            env["DYN_LOG"] = log_level
        return env


class Kinds:
    """The kinds of spares that a run's services need; `env` is what every worker is told beside the factory's."""

    def __init__(self, launcher: Launcher, env: Callable[[], Mapping[str, str]], gpus: Sequence[GpuDevice]) -> None:
        self._launcher = launcher
        self._env = env
        self._alike = len({device.name for device in gpus}) <= 1
        self.visible = cuda_visible_devices(gpus) if launcher.factory.settings.pin_gpus else None

    def wanted(self) -> tuple[Kind, ...]:
        """One for each engine and environment of the graph's services, in its order."""
        found = (self.of(spec) for spec in self._launcher.factory.graph.services)
        return tuple(dict.fromkeys(kind for kind in found if kind is not None))

    def of(self, spec: ServiceSpec) -> Kind | None:
        """The kind of spare that can become a worker of that service; None if none can: it is a command, it computes
        nothing, or the devices differ and what was found out of one while importing would be used on another."""
        if spec.runtime is not None or not ROLES[spec.role].computes:
            return None
        named = cast("EngineName | None", spec.config.get("engine"))
        engine = engine_of(named, spec.config.get("model"), TINY_MODEL)
        if engine == "vllm" and not self._alike:
            return None
        factory = self._launcher.factory
        plan = factory.plan(spec, "", ())
        kept = early({**plan.env, **self._env()}, factory.key_env.get(spec.name, {}))
        return Kind(engine, plan.cwd, tuple(sorted(kept.items())))


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that /proc need not show."""
    return [name for name in env if is_secret_variable(name)]
