"""How a planner has its decisions carried out by another environment (Dynamo's `VirtualConnector`): through etcd.

It writes how many workers it wants (`core.virtual`), and whoever runs them acknowledges. While a decision waits for
that, the planner holds: an adjustment is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.notes import About, Over, Tell, Trouble
from dynamo_local.core.virtual import NOT_SET, KeysState
from dynamo_local.errors import DynamoError
from dynamo_local.planner.connectors.local_connector import Refused
from dynamo_local.planner.connectors.virtual_keys import VirtualKeys
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

UNHEARD = Trouble("a decision without an acknowledgement")


def _logged(text: str, about: About = None) -> None:
    """A person reads it in the log."""
    log.warning("%s", text)


MAX_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Written:
    """The decision was written to etcd under `decision_id`; None: it was there already, and nothing was written.

    `acknowledged` says whether the environment has carried it out; None where nobody waited for that.
    """

    decision_id: int | None
    acknowledged: bool | None = None


@dataclass(slots=True)
class _Waiting:
    """The decision whose acknowledgement is awaited, and since when."""

    decision_id: int
    since_s: float
    given_up: bool = False


class VirtualConnector:
    """Follows the keys between `start` and `close`. `prefill` is None in an aggregated graph.

    `counts` are the present workers by component: steps count from there if no number was decided yet.
    A decision that is not acknowledged within `max_wait_s` is given up: new ones are made all the same. `blocking`
    waits for the acknowledgement of each decision before it goes on.
    """

    whole = True
    """A decision has one number, however many steps it has."""

    def __init__(
        self,
        keys: VirtualKeys,
        clock: Clock,
        *,
        prefill: str | None,
        decode: str,
        counts: Callable[[], Mapping[str, int]],
        max_wait_s: float = MAX_WAIT_S,
        blocking: bool = False,
        tell: Tell = _logged,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._prefill = prefill
        self._decode = decode
        self._counts = counts
        self._max_wait_s = max_wait_s
        self._blocking = blocking
        self._tell = tell
        self._unheard = False
        """A decision was given up, and none has been acknowledged since."""
        self._last_id = NOT_SET
        self._waiting: _Waiting | None = None
        self._closing = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow the keys. Raises `EtcdUnavailable`."""
        await self._keys.refresh()
        self._following = asyncio.ensure_future(self._keys.follow())

    def change(self, *, max_wait_s: float, blocking: bool) -> None:
        """Other options, from now on."""
        self._max_wait_s, self._blocking = max_wait_s, blocking

    def release(self) -> None:
        """Stop waiting for an acknowledgement: the planner stops."""
        self._closing.set()

    async def close(self) -> None:
        """Stop following the keys. Closing twice is no error."""
        self.release()
        task, self._following = self._following, None
        await ended(task)

    # --- deciding ----------------------------------------------------------------------------------

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Written | Refused:
        """One more than was decided last."""
        return await self._change(component, 1)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Written | Refused:
        """One less than was decided last, and never less than none."""
        return await self._change(component, -1)

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Written | Refused:
        """Ask for this many workers of each component, as one decision.

        Refused while the last one waits for its acknowledgement, and while etcd does not answer.
        """
        try:
            written = await self._write(await self._keys.refresh(), targets.get(self._prefill or ""), targets)
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        if isinstance(written, Refused) or written.decision_id is None or not self._blocking:
            return written
        return Written(written.decision_id, await self._acknowledged(written.decision_id))

    async def _change(self, component: str, step: int) -> Written | Refused:
        try:
            told = await self._keys.refresh()
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        decision = told.decision
        decided = decision.num_prefill_workers if component == self._prefill else decision.num_decode_workers
        have = self._counts()[component] if decided == NOT_SET else decided
        return await self.set_component_replicas({component: max(0, have + step)})

    async def _write(self, told: KeysState, prefill: int | None, targets: Mapping[str, int]) -> Written | Refused:
        decision, decode = told.decision, targets.get(self._decode)
        same = prefill in (None, decision.num_prefill_workers) and decode in (None, decision.num_decode_workers)
        # Numbers without their id are no decision: a writer was interrupted between the two.
        if same and decision.decision_id != NOT_SET and not told.half_written:
            log.info(
                "No scaling needed (prefill=%d, decode=%d), skipping ETCD update",
                decision.num_prefill_workers,
                decision.num_decode_workers,
            )
            return Written(None)
        if self.pending():
            why = f"decision {decision.decision_id} is not acknowledged yet ({self._keys.root}scaled_decision_id)"
            return Refused(why, "not_acknowledged", retryable=True)
        decision_id = max(decision.decision_id, told.scaled_decision_id, self._last_id) + 1
        await self._keys.decide(prefill, decode, decision_id)
        self._last_id = decision_id
        self.pending()  # start waiting for it
        log.info("wrote %s below %s", self._keys.told.decision, self._keys.root)
        return Written(decision_id)

    # --- waiting -----------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether a decision waits for its acknowledgement, and was not given up."""
        told, now_s = self._keys.told, self._clock.now_s()
        if told.acknowledged:
            if self._unheard:
                self._unheard = False
                self._tell(f"planner: decision {told.decision.decision_id} is acknowledged", Over(UNHEARD.name))
            self._waiting = None
            return False
        decision_id = told.decision.decision_id
        if self._waiting is None or self._waiting.decision_id != decision_id:
            self._waiting = _Waiting(decision_id, now_s)
        waiting = self._waiting
        if not waiting.given_up and now_s - waiting.since_s >= self._max_wait_s:
            waiting.given_up = self._unheard = True
            self._tell(
                f"planner: decision {decision_id} was not acknowledged within {self._max_wait_s:g} s "
                f"({self._keys.root}scaled_decision_id); new decisions are made all the same",
                UNHEARD,
            )
        return not waiting.given_up

    async def _acknowledged(self, decision_id: int) -> bool:
        """Wait for it, until it is given up or the planner stops."""
        seen = asyncio.ensure_future(self._keys.until(lambda told: told.scaled_decision_id >= decision_id))
        closing = asyncio.ensure_future(self._closing.wait())
        late = asyncio.ensure_future(self._clock.sleep_until(self._clock.now_s() + self._max_wait_s))
        waiters = (seen, closing, late)
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            return seen.done()
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """What `dynamo planner status --json` says of it."""
        pending, told = self.pending(), self._keys.told
        since_s = None if self._waiting is None else self._waiting.since_s
        return {
            "keys": self._keys.root,
            "num_prefill_workers": told.decision.num_prefill_workers,
            "num_decode_workers": told.decision.num_decode_workers,
            "decision_id": told.decision.decision_id,
            "scaled_decision_id": told.scaled_decision_id,
            "pending": pending,
            "waits_s": None if since_s is None else round(self._clock.now_s() - since_s, 3),
        }
