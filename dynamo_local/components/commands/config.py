"""The section of a service that is a command, checked before anything starts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from dynamo_local.components.commands import launch as launching
from dynamo_local.components.commands import launch as placeholders
from dynamo_local.core.types import SECONDS_MAX, Role
from dynamo_local.engines.sleep import GROWTH_MAX_BYTES
from dynamo_local.sdk.checks import listing, nearest

PortNumber = Annotated[int, Field(ge=0, le=65535)]
SHUTDOWN_MAX_S = 25.0
"""A worker's shutdown hooks have 30 s."""


def _ports(value: Any) -> Any:
    if isinstance(value, dict) and any(isinstance(port, bool) for port in value.values()):
        raise ValueError("must map names to port numbers")
    return value


class CommandConfig(BaseModel):
    """Keys that every command has, whatever its runtime."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    needs_ports: ClassVar[tuple[str, ...]] = ()
    """Ports without which this runtime cannot tell how its command is."""

    command: str | list[str | int | float]
    """The program and its words: a list, or a string that is split as a shell would."""
    role: Role = Role.OTHER
    """How the planner and a drain treat it: frontend, decode, prefill, aggregated, other."""
    runtime: str = launching.NONE
    """One of `registry.MODULES`: whoever reads a section has chosen this model by it."""
    """The command's runtime: how its health and load are asked for, and how it leaves the routing."""
    model: str | None = None
    """The value of `{model}`."""
    ports: Annotated[dict[str, PortNumber], BeforeValidator(_ports)] = Field(default_factory=dict)
    """Fixed numbers for some of `{port:NAME}`; the others, and 0, are any free ones."""
    sleep_hook: str | list[str | int | float] | None = None
    """With ServiceArgs.standby: a program that lets the command's GPU go, and returns when that is done (exit code 0);
    placeholders as in the command, DYN_SLEEP_LEVEL is 1 or 2."""
    wake_hook: str | list[str | int | float] | None = None
    """Undoes what `sleep_hook` did, and returns when the command takes requests again."""
    standby_growth_max_bytes: int = Field(default=GROWTH_MAX_BYTES, ge=1)
    """With ServiceArgs.standby: a command whose memory has grown by more than this over its sleeps is replaced."""
    stop_timeout_s: float = Field(default=20.0, gt=0, le=SHUTDOWN_MAX_S, allow_inf_nan=False)
    """Seconds from SIGTERM, when nothing is in flight any more, to SIGKILL."""
    health_bound_s: float = Field(default=30.0, gt=0, le=SECONDS_MAX, allow_inf_nan=False)
    """A command that was ready and has not answered for so long is hung: its worker ends, and is started again."""

    @field_validator("command", mode="before")
    @classmethod
    def _splits(cls, value: Any) -> Any:
        placeholders.words_of(value)
        return value

    @model_validator(mode="after")
    def _hooks_fit(self) -> Self:
        if (self.sleep_hook is None) != (self.wake_hook is None):
            raise ValueError("sleep_hook and wake_hook belong together; give both, or none")
        for hook in (self.sleep_hook, self.wake_hook):
            if hook is None:
                continue
            placeholders.check(placeholders.words_of(hook), model=self.model)
            missing = set(placeholders.port_names(placeholders.words_of(hook))) - set(
                placeholders.port_names(self.words)
            )
            if missing:
                raise ValueError(f"a hook has {{port:{min(missing)}}}, but the command does not listen there")
        return self

    def why_no_standby(self) -> str | None:
        """Why such a command cannot be put to sleep; None if it can."""
        if self.sleep_hook is None:
            return f"the runtime {self.runtime} has no sleep of its own; give `sleep-hook` and `wake-hook`"
        return None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        placeholders.check(self.words, model=self.model)
        wanted = launching.ports_wanted(self.runtime, self.model_dump())
        for name in self.ports:
            if name not in wanted:
                raise ValueError(
                    f"ports.{name} has no effect: the command has no {{port:{name}}}, but {listing(wanted)}"
                    f"{nearest(name, wanted)}"
                )
        for name in self.needs_ports:
            if name not in wanted:
                raise ValueError(f"the runtime {self.runtime} needs {{port:{name}}} in the command")
        if len(set(self.fixed_ports)) < len(self.fixed_ports):
            raise ValueError("ports gives one number to two names")
        return self

    @property
    def fixed_ports(self) -> list[int]:
        """The numbers in `ports` that are meant as such."""
        return [port for port in self.ports.values() if port]

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command, with placeholders as written."""
        return placeholders.words_of(self.command)

    def check_envs(self, envs: dict[str, str]) -> None:
        """Raise `ValueError` for variables in `ServiceArgs.envs` that would have no effect."""
