"""The checks of `dynamo doctor`: from what was read of a host to findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.core.doctor import gpus, host, model, runs, software
from dynamo_local.core.doctor.findings import Check

SUBJECTS: Mapping[str, tuple[Check, ...]] = {
    "GPUs": gpus.CHECKS,
    "Host": host.CHECKS,
    "Runs": runs.CHECKS,
    "Software": software.CHECKS,
    "Model": model.CHECKS,
}
"""All checks, in the order in which they are shown."""
CHECKS: tuple[Check, ...] = tuple(check for checks in SUBJECTS.values() for check in checks)
