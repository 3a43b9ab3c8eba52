"""Options of the policy `sla` alone."""

from __future__ import annotations

from pydantic import BaseModel

from dynamo_local.config.planner.kinds import OPTIONS

ALIASES: dict[str, str] = {}


class SlaFields(BaseModel):
    """How the calculator corrects its model."""

    model_config = OPTIONS

    no_correction: bool = False
    """Believe the profile as it is: what is measured does not correct it."""
