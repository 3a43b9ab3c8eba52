"""What a worker says about standby in its ready key: `core.life.standby.StandbyFacts`, as JSON."""

from __future__ import annotations

import os
from typing import Any

from dynamo_local.core.types import Missing
from dynamo_local.system.processes import session_members
from dynamo_local.worker.context import Context, Identity
from dynamo_local.worker.sleeping import Sleeping


def standby_facts(identity: Identity, context: Context, sleeping: Sleeping) -> dict[str, Any]:
    """`{"standby": {…}}`; empty for a worker that is not made to sleep. None is "unknown"."""
    if not identity.standby:
        return {}
    sleeper = context.sleeper
    facts: dict[str, Any] = {"order": sleeping.done, "asleep": sleeping.asleep, "level": sleeping.level}
    if sleeper is None:
        facts["cannot"] = "its component has no engine that can"
    else:
        facts["cannot"], facts["recycle"] = sleeper.cannot, sleeper.recycle
        facts["rehearsed_bytes"] = _known(sleeper.rehearsed_bytes)
        if sleeping.asleep and sleeper.asleep is not None:
            facts["vram_bytes"] = _known(sleeper.asleep.vram_bytes)
            facts["host_bytes"] = _known(sleeper.asleep.host_bytes)
            facts["pids"] = sorted(session_members(os.getsid(0)))
    return {"standby": facts}


def _known(value: int | Missing) -> int | None:
    return None if isinstance(value, Missing) else value
