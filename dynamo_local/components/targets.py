"""Targets in the sections of Processor, Router and VllmWorker, and the profile by which requests are dispatched."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

from dynamo_local.components.engine_options import check_sim_options
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.core.routing.choice import RouterPolicy
from dynamo_local.core.routing.estimates import Costs, Targets, Timing
from dynamo_local.core.types import Missing
from dynamo_local.profile.reading import PROFILE_DOCUMENT

log = logging.getLogger(__name__)


class TargetOptions(BaseModel):
    """Options that the three have in common."""

    ttft: float | None = Field(
        default=None, gt=0, description="Target for the time to first token, ms. With a target, `slo` is the default."
    )
    itl: float | None = Field(
        default=None, gt=0, description="Target for a request's mean gap between tokens, ms. The same."
    )
    profile_results_dir: str | None = Field(
        default=None,
        min_length=1,
        description="The engine's profile, for `slo`: a folder, or the name of one that ships (docs/profiles.md). "
        "Default: that of the sim engine; vLLM has none.",
    )

    @property
    def targets(self) -> Targets:
        """Those that were configured, in seconds."""
        return Targets.of_ms(self.ttft, self.itl)

    @property
    def wants_slo(self) -> bool:
        """Whether this service is to decide by targets."""
        raise NotImplementedError

    def times(self) -> EngineTimes | Missing:
        """The name of the engine whose times decide."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The profile's name, and the speed that divides its times."""

    profile: str
    speed: float

    def __str__(self) -> str:
        return f"the profile {self.profile} at speed {self.speed:g}"

    def timing(self) -> Timing:
        """The times themselves. Raises `ConfigError` for a profile that cannot be read."""
        from dynamo_local.profile.interpolation import ProfileModel

        return Timing(ProfileModel.load(self.profile), self.speed)


def times_of(profile: str | None, sim: dict[str, Any] | None) -> EngineTimes | Missing:
    """The source of estimates: that profile, or the one of the sim engine with these options. None: the engine is
    another one."""
    from dynamo_local.engines.sim.options import SimOptions

    options = None if sim is None else SimOptions.from_mapping(sim)
    name = profile or (None if options is None else options.profile)
    if name is None:
        return Missing("no profile-results-dir is given, and the engine's times are not known")
    # A profile that `dynamo profile` measured has the speed of these engines in it.
    measured = profile is not None and (Path(profile).expanduser() / PROFILE_DOCUMENT).is_file()
    return EngineTimes(name, 1.0 if options is None or measured else options.speed)


class RoutingOptions(TargetOptions):
    """Those of Processor and Router, which have no engine."""

    router: RouterPolicy | None = None
    sim: dict[str, Any] | None = Field(
        default=None,
        description="For slo: the sim engine's options, as the workers have them (list `sim` in common-configs).",
    )

    @field_validator("sim")
    @classmethod
    def _sim_options(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if value is None else check_sim_options(value)

    @property
    def policy(self) -> RouterPolicy:
        """The router in force: by default slo where there are targets."""
        return self.router or ("slo" if self.targets.given else "least-loaded")

    @property
    def wants_slo(self) -> bool:
        return self.policy == "slo"

    def times(self) -> EngineTimes | Missing:
        sim = self.sim if self.sim is not None or getattr(self, "model", None) != TINY_MODEL else {}
        return times_of(self.profile_results_dir, sim)

    def costs(self) -> Costs | Missing:
        """The costs that `slo` decides by. Raises `ConfigError`."""
        times = self.times()
        return times if isinstance(times, Missing) else Costs(times.timing(), self.targets)

    def what_slo_lacks(self) -> str | None:
        """Why `slo` cannot decide although it is wanted; None: it can, or it is not. Raises `ConfigError`."""
        if not self.wants_slo or not isinstance(costs := self.costs(), Missing):
            return None
        return f"router slo picks as least-loaded: {costs.reason}"


def usable_costs(options: RoutingOptions) -> Costs | None:
    """The costs that `slo` decides by. None, with a line in the log if `slo` is wanted, if there are none. Raises
    `ConfigError`."""
    costs = options.costs()
    if not isinstance(costs, Missing):
        return costs
    if (lacks := options.what_slo_lacks()) is not None:
        log.warning("%s", lacks)
    return None
