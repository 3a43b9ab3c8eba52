"""What is under way beside the states: one worker's change of role, and the whole run's leaving."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlipTarget:
    """A change of role that is under way: what the worker is to be called, in which component, with which suffix.

    `asking`: it is being asked now. `cancelled`: a person has taken it back, which may come too late.
    """

    name: str
    component: str
    n: int
    asking: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The whole run is leaving. `stage` is an index into `roles.STAGES`, beyond the last when all are gone.

    `now`: nothing is waited for any more.
    """

    stage: int = 0
    now: bool = False
