"""Drains workers whose arbiter is dead: in the stages of a `down`, each worker within its own deadline."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

from dynamo_local.arbiter.leftovers import Known
from dynamo_local.core.fleet.states import STAGES
from dynamo_local.system.processes import send_signal

EXIT_POLL_S = 0.02


def drain_without_arbiter(workers: Iterable[Known], tell: Callable[[str], None]) -> None:
    """Drain workers whose arbiter is dead: asked by SIGTERM, waited for within each one's deadline.

    Blocks. The caller ends what is still there afterwards.
    """
    workers = list(workers)
    for stage in STAGES:
        asked = [worker for worker in workers if worker.role in stage and worker.alive]
        for worker in asked:
            tell(f"{worker.name}: draining")
            send_signal(worker.pid, signal.SIGTERM)
        began_s = time.monotonic()
        for worker in asked:
            while worker.alive and time.monotonic() - began_s < worker.drain_deadline_s:
                time.sleep(EXIT_POLL_S)
