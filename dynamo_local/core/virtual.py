"""The virtual connector's protocol: four keys in etcd between a planner, which decides, and an environment, which acts.

Below the root (`v1/{namespace}/planner/`; in Dynamo up to 0.5 `/{namespace}/planner/`), as ASCII decimals:

| Key | Written by | What |
|---|---|---|
| `num_prefill_workers` | the planner | wanted prefill workers |
| `num_decode_workers` | the planner | wanted decode workers; those of an aggregated graph, too |
| `decision_id` | the planner, last | from 0, one more with each decision |
| `scaled_decision_id` | the environment | the newest decision that has been carried out |

A key that is missing, or holds -1, is not set. The planner writes the three keys of a decision one after the other, the
id last. So numbers that are younger than the id belong to an unfinished decision.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

NUM_PREFILL_WORKERS = "num_prefill_workers"
NUM_DECODE_WORKERS = "num_decode_workers"
DECISION_ID = "decision_id"
SCALED_DECISION_ID = "scaled_decision_id"

NOT_SET = -1
WORKERS_MAX = 9999
"""As many as `dynamo scale` takes."""
ID_MAX = 2**63 - 1

_NUMBER = re.compile(rb"-1|[0-9]{1,19}")
_SHOWN = 40


class Layout(enum.StrEnum):
    """Where the keys are."""

    V1 = "v1"
    """Dynamo 1.x."""
    V0 = "v0"
    """Dynamo up to 0.5."""


def root(namespace: str, layout: Layout) -> str:
    """The prefix of the four keys."""
    return f"v1/{namespace}/planner/" if layout is Layout.V1 else f"/{namespace}/planner/"


@dataclass(frozen=True, slots=True)
class PlannerDecision:
    """How many workers a planner wants; -1 is not set: nothing is wanted of that role, or nothing was decided yet."""

    num_prefill_workers: int = NOT_SET
    num_decode_workers: int = NOT_SET
    decision_id: int = NOT_SET

    def __str__(self) -> str:
        return f"decision {self.decision_id} (prefill={self.num_prefill_workers}, decode={self.num_decode_workers})"


@dataclass(frozen=True, slots=True)
class Stored:
    """A value as etcd has it, and the revision at which it was written."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class KeysState:
    """The four keys together. An unreadable one counts as not set, and `faults` names it.

    `half_written`: a number is younger than `decision_id`, so its decision is not complete.
    """

    decision: PlannerDecision = PlannerDecision()
    scaled_decision_id: int = NOT_SET
    half_written: bool = False
    faults: tuple[str, ...] = ()

    @property
    def acknowledged(self) -> bool:
        """Nothing is to be done: no decision, or the environment has carried it out."""
        return self.scaled_decision_id >= self.decision.decision_id


def read(stored: Mapping[str, Stored]) -> KeysState:
    """The four keys, by name, as they were found. Other names are of no interest.

    A broken `scaled_decision_id` is no fault of the planner's: it counts as not set, and the next one heals it.
    """
    faults: dict[str, str] = {}

    def number(name: str, greatest: int) -> int:
        found = stored.get(name)
        if found is None:
            return NOT_SET
        if _NUMBER.fullmatch(found.value) and (value := int(found.value)) <= greatest:
            return value
        shown = repr(found.value[:_SHOWN])[1:] + ("…" if len(found.value) > _SHOWN else "")
        faults[name] = f"{name} is {shown}: a whole number from 0 to {greatest} was expected"
        return NOT_SET

    decision = PlannerDecision(
        number(NUM_PREFILL_WORKERS, WORKERS_MAX), number(NUM_DECODE_WORKERS, WORKERS_MAX), number(DECISION_ID, ID_MAX)
    )
    scaled = number(SCALED_DECISION_ID, ID_MAX)
    faults.pop(SCALED_DECISION_ID, None)
    numbers = [stored[name].revision for name in (NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS) if name in stored]
    half_written = DECISION_ID in stored and max(numbers, default=0) > stored[DECISION_ID].revision
    return KeysState(decision, scaled, half_written, tuple(faults.values()))


def encode(number: int) -> bytes:
    """A number as the keys hold it."""
    return str(number).encode("ascii")
