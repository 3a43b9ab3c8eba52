"""The engines to measure: those of a configuration, as `dynamo serve` would start them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.request import ServeOptions, understand
from dynamo_local.components.commands.launch import DYNAMO_1X, HTTP, words_of
from dynamo_local.components.engine_facts import engines_of
from dynamo_local.config.resolve import planned_components
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.errors import BadInput
from dynamo_local.profile.outside import NOTHING, Given
from dynamo_local.sdk.service_config import underscored

PREFILL, DECODE, AGG = "prefill", "decode", "agg"
WAITING_MAX = 4096
SLOW_START_S = 900.0
"""Start deadline of engines that import and compile.

On a busy host the five minutes of `dynamo serve` were too short.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """`components` by role: prefill and decode, or agg alone. `engines` is what `profile.json` is compared with."""

    graph: str | None
    file: Path | None
    overrides: tuple[str, ...]
    namespace: str
    gpus: str | None
    components: Mapping[str, str]
    spec: GraphSpec
    engines: Mapping[str, Mapping[str, Any]]
    start_deadline_s: float | None = None
    """As asked for; None: what is usual."""
    given: Given = NOTHING
    """Limits that a server started by a command does not report."""

    def service(self, component: str) -> ServiceSpec:
        """The component of that name."""
        return self.spec.service(component)

    def gpus_of(self, role: str) -> int:
        """GPUs of one engine."""
        return max(1, self.service(self.components[role]).resources.gpu)

    def runtime_of(self, component: str) -> str | None:
        """`http` or `dynamo-1x` for a command, which is measured from outside; None for a worker of our own."""
        return self.service(component).runtime

    def model_of(self, component: str) -> str | None:
        """Its name in the API of a server that does not list it; None: the first that the server lists."""
        found: str | None = _underscored(self.service(component).config).get("served_model_name")
        return found

    def metrics_of(self, component: str) -> str | None:
        """The path of a server's metrics; None: it has none."""
        found: str | None = _underscored(self.service(component).config).get("metrics", "/metrics")
        return found

    def words_of(self, component: str) -> tuple[str, ...]:
        """Runtime of a component that is a command."""
        return words_of(self.service(component).config["command"])

    @property
    def standalone(self) -> bool:
        """Each worker does both: an aggregated graph."""
        return AGG in self.components

    @property
    def deadline_s(self) -> float | None:
        """Deadline of the graph's start. None: that of `dynamo serve`."""
        return self.start_deadline_s or (None if self.engine_names <= {"sim"} else SLOW_START_S)

    @property
    def engine_names(self) -> frozenset[str]:
        """The engine of the measured components: sim, vllm."""
        return frozenset(self.engines[role]["engine"] for role in self.components)

    def has_prefix_cache(self, role: str) -> bool:
        """Not where the section says that it keeps none: a cached prompt cannot be measured there."""
        return self.engines[role]["options"].get("enable_prefix_caching") is not False

    def serve_words(self) -> list[str]:
        """The words behind `dynamo`, with the overrides of a measurement.

        These are: a port of its own, no planner, and workers that accept measurements, never refuse, and prefill where
        they are told to. Dynamo's workers are asked through their frontend. So there is one of each role, and the one
        that answers is known.
        """
        words = ["serve", *([self.graph] if self.graph else []), *(["-f", str(self.file)] if self.file else [])]
        words += ["--namespace", self.namespace, "--no-planner", "--detach"]
        words += ["--gpus", self.gpus] if self.gpus else []
        words += ["--start-deadline", f"{self.deadline_s:g}"] if self.deadline_s else []
        words += [*self.overrides, *self._ports()]
        for component in dict.fromkeys(self.components.values()):
            runtime = self.runtime_of(component)
            words += [f"--{component}.measurable=true"] if runtime is None else []
            words += [f"--{component}.ServiceArgs.workers=1"] if runtime == DYNAMO_1X else []
        decode = self.components.get(DECODE) or self.components.get(AGG)
        if decode is not None and self.runtime_of(decode) is None:
            words.append(f"--{decode}.max-num-waiting={WAITING_MAX}")
        return words

    def _ports(self) -> list[str]:
        """A port that is free, whatever the file says: the configured graph may be running."""
        found = []
        for service in self.spec.services:
            if service.runtime == DYNAMO_1X and service.role is Role.FRONTEND:
                found.append(f"--{service.name}.ports.http=0")
            elif service.name == "Frontend" and service.runtime is None:
                found.append("--Frontend.port=0")
        return found


def _underscored(section: Mapping[str, Any]) -> dict[str, Any]:
    return {underscored(str(key)): value for key, value in section.items()}


def understood(
    graph: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    namespace: str,
    gpus: str | None,
    roles: str | None,
    start_deadline_s: float | None = None,
    given: Given = NOTHING,
) -> Target:
    """Raises `BadInput` for what cannot be served, or not measured."""
    options = ServeOptions(target=graph, file=file, overrides=overrides, namespace=namespace, gpus=gpus, planner=False)
    request = understand(options, os.environ, Path.cwd(), only_plan=False)
    prefill, decode = planned_components(request.graph)
    components = {AGG: decode} if prefill is None else {PREFILL: prefill, DECODE: decode}
    for service in request.graph.services:
        if service.name in components.values() and service.runtime not in (None, HTTP, DYNAMO_1X):
            raise BadInput(
                f"{service.name} is a command of the runtime {service.runtime}, and nobody knows how to ask it; "
                f"if it is an OpenAI server, give it the runtime {HTTP}"
            )
    wanted = components if roles is None else _chosen(components, roles)
    return Target(
        graph,
        file,
        overrides,
        namespace,
        gpus,
        wanted,
        request.graph,
        engines_of(request.graph),
        start_deadline_s,
        given,
    )


def _chosen(components: Mapping[str, str], roles: str) -> dict[str, str]:
    names = [role.strip() for role in roles.split(",")]
    for role in names:
        if role not in components:
            raise BadInput(f"--roles {role!r}: this graph has {' and '.join(components)}")
    return {role: component for role, component in components.items() if role in names}
