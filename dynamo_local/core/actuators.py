"""By what a planner's numbers of workers may be carried out, beside starts and drains. Pure."""

from __future__ import annotations

import enum


class Actuator(enum.StrEnum):
    """A worker too few in one component and one too many in another is a flip; one that is given up and may be kept on
    standby is put to sleep, and woken when one more is wanted."""

    FLIP = "flip"
    WAKE = "wake"


EVERY = frozenset(Actuator)
"""Whatever the components are configured for."""
WAKES = frozenset({Actuator.WAKE})
"""Each component for itself."""
