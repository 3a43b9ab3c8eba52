"""A deployment as `dynamo apply` sends it to the arbiter: read and checked by the command, as plain values.

The arbiter cannot import the graph's code again, and must not wait for it. The command does this, as `dynamo serve`
would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.config.schema import HostConfig
from dynamo_local.core.differences import Described
from dynamo_local.core.fleet.backoff import RestartPolicy
from dynamo_local.core.secrets import mask_config
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import BadInput
from dynamo_local.sdk.settings import validate_section

NOT_OPTIONS = frozenset({"enabled", "namespace"})


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """The sections of a deployment, merged, as workers read them.

    Secrets are in the clear: the specification travels over a private socket and stays in memory. `planner` is the
    section as given, or None. `file` and `overrides` are its origin.
    """

    graph: GraphSpec
    host: dict[str, Any]
    sections: dict[str, Any]
    planner: dict[str, Any] | None
    planner_starts: bool
    file: str | None = None
    overrides: tuple[str, ...] = ()
    command_line: dict[str, Any] = field(default_factory=dict)
    """The run's words from now on, those of earlier commands included, as sections."""

    def as_json(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(asdict(self)))

    @classmethod
    def from_json(cls, given: Any) -> DeploymentSpec:
        """Read the result of `as_json`. Raises `BadInput` that names the fault."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise BadInput(f"this is no deployment: {error}; `dynamo apply -f FILE` makes one") from None

    @property
    def sections_json(self) -> str:
        """`DYNAMO_SERVICE_CONFIG` of its workers."""
        return json.dumps(self.sections)

    @property
    def masked_json(self) -> str:
        """The sections with masked secrets, for the statefile."""
        return json.dumps(mask_config(self.sections))

    @property
    def host_config(self) -> HostConfig:
        """Raises `ConfigError`."""
        return validate_section(HostConfig, "Host", self.host)

    @property
    def policy(self) -> RestartPolicy:
        return RestartPolicy(**self.host_config.restart.model_dump())

    @property
    def planner_config(self) -> PlannerConfig | None:
        """Raises `ConfigError`."""
        return None if self.planner is None else planner_section("Planner", self.planner)

    @property
    def described(self) -> Described:
        """The description to compare with the running deployment."""
        options = self.planner_config
        return Described(
            self.graph, self.host, {} if options is None else options_of(options), planner_starts=self.planner_starts
        )


def options_of(config: PlannerConfig) -> Mapping[str, Any]:
    """All options of the planner's policy by name."""
    options: dict[str, Any] = config.model_dump(mode="json", include=set(config.named) - NOT_OPTIONS)
    return options
