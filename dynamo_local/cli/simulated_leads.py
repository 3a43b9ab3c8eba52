"""`--lead`: how long each way to one more worker takes in the twin, as given or as measured on this host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from dynamo_local.core.durations import SECONDS_MAX
from dynamo_local.core.lead_times import Rung
from dynamo_local.errors import BadInput

if TYPE_CHECKING:
    from dynamo_local.twin.options import LeadOptions

NAMES = ("flip", "wake", "spare", "cold", "sleep")
MEASURED = "measured"
"""`--lead measured`, or `--lead measured:NAMESPACE`."""
NAMESPACE = "dynamo"
RUNGS: Mapping[str, tuple[Rung, ...]] = {
    "flip": (Rung.FLIP_TO_DECODE, Rung.FLIP_TO_PREFILL),
    "wake": (Rung.WAKE_1, Rung.WAKE_2),
    "spare": (Rung.SPARE,),
    "cold": (Rung.COLD,),
}


def leads_of(words: Sequence[str], start_up_s: float) -> LeadOptions:
    """The twin's leads; what is not said is the twin's default, and `cold` is `--start-up-s`. A number counts more than
    what was measured, the last one most. Raises `BadInput`."""
    from dynamo_local.twin.options import LeadOptions

    parts = [part.strip() for word in words for part in word.split(",")]
    measured = [_measured(part) for part in parts if part.partition(":")[0] == MEASURED]
    given = dict(_given(part) for part in parts if part.partition(":")[0] != MEASURED)
    found = {**(measured[-1] if measured else {}), **given}
    return LeadOptions(**{"cold_s": start_up_s, **{f"{name}_s": value for name, value in found.items()}})


def _given(part: str) -> tuple[str, float]:
    name, _, value = part.partition("=")
    if name not in NAMES:
        raise BadInput(f"--lead {part!r}: there are {', '.join(NAMES)}, such as spare=8,cold=45; or {MEASURED}")
    try:
        seconds = float(value)
    except ValueError:
        raise BadInput(f"--lead {part!r}: {value!r} is no number of seconds") from None
    if not 0 <= seconds <= SECONDS_MAX:
        raise BadInput(f"--lead {part!r}: seconds, 0 to {SECONDS_MAX:g}")
    return name, seconds


def _measured(text: str) -> dict[str, float]:
    """The slowest component's median of each rung that was measured in that namespace."""
    from dynamo_local.state import LeadFile, state_folder
    from dynamo_local.twin.options import DECODE, PREFILL

    namespace = text.partition(":")[2] or NAMESPACE
    file = LeadFile(state_folder(os.environ))
    components: dict[str, Any] = file.all(namespace)
    chosen = {name: rungs for name, rungs in components.items() if name in (DECODE, PREFILL)} or components
    found: dict[str, float] = {}
    for name, rungs in RUNGS.items():
        medians = [median(samples[rung]) for samples in chosen.values() for rung in rungs if samples.get(rung)]
        if medians:
            found[name] = max(medians)
    if not found:
        raise BadInput(f"--lead {text}: nothing was measured in namespace {namespace!r} on this host; see {file.path}")
    return found
