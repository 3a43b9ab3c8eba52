"""What the arbiter asks of a worker that is to change its role."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_local.control.executor.worker_asks import WorkerAsks
from dynamo_local.core.life.instructions import CallOffFlip, FlipRole
from dynamo_local.core.life.stimuli import FlipAnswered
from dynamo_local.core.types import LEASE
from dynamo_local.errors import DeadlineExceeded, DynamoError, InfraUnavailable, NoWorkers, RemoteError

log = logging.getLogger(__name__)

FLIP_TIMEOUT_S = 15.0
"""A flip takes some 100 ms; a canary that waits behind a long prefill takes as long as that."""
_NO_ANSWER = (NoWorkers, DeadlineExceeded, InfraUnavailable, RemoteError)


class FlipAsks:
    """The questions of a flip, to the workers of one namespace. A refusal is an observation, too.

    `section` gives a component's options as they are now: the worker knows those of when it was started.
    """

    def __init__(self, asks: WorkerAsks, section: Callable[[str], Mapping[str, Any]]) -> None:
        self._asks = asks
        self._section = section

    async def ask(self, act: FlipRole) -> FlipAnswered:
        """Have it flip, or tell how far it is. One that has flipped answers under its new name."""
        cause = f"control:{act.name}"
        why = ""
        section = dict(self._section(act.component))
        about = {"to": act.to, "component": act.component, "pid": act.pid, "section": section}
        for name in (act.name, act.to):
            try:
                answer = await self._asks.control(name, "flip", timeout_s=FLIP_TIMEOUT_S, **about)
            except _NO_ANSWER as error:
                why = why or str(error)
                continue
            except DynamoError as error:
                log.warning("%s does not become %s: %s", act.name, act.to, error)
                return FlipAnswered(stimulus_id=cause, name=act.name, pid=act.pid, to=act.to, error=str(error))
            lease, told = str(answer.get("lease")), answer.get("endpoints")
            endpoints = tuple(str(each) for each in told) if isinstance(told, list) else ()
            if answer.get("pid") != act.pid or not re.fullmatch(LEASE, lease):
                why = why or f"{name} answered for another process"
                continue
            return FlipAnswered(
                stimulus_id=cause, name=act.name, pid=act.pid, to=act.to, lease=lease, endpoints=endpoints
            )
        log.warning("nobody can tell yet whether %s is %s now: %s", act.name, act.to, why)
        return FlipAnswered(stimulus_id=cause, name=act.name, pid=act.pid, to=act.to, error=why, unknown=True)

    async def call_off(self, act: CallOffFlip) -> None:
        """Have it stay what it is. What came of it is the answer to the other question."""
        try:
            await self._asks.control(act.name, "cancel_flip")
        except DynamoError as error:
            log.info("%s: its flip could not be taken back: %s", act.name, error)
