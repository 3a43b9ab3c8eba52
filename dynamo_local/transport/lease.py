"""A worker's lease in etcd: kept alive, its keys registered again when etcd lost them, not when it was revoked.

To the client library a revoked lease, an expired one and one that etcd forgot look alike: a keepalive is answered
with no TTL. `classify_missing_lease` tells them apart.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.types import lease_hex
from dynamo_local.errors import DynamoError, EtcdUnavailable, LeaseNotFound
from dynamo_local.ports import DeleteEvent, KeyValueStore, SnapshotEvent
from dynamo_local.system.executors import ended, together

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause between attempts while etcd is away: keys are registered again within this time of its return."""
KEEPALIVES_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class Revoked:
    """Somebody took the lease away: leave, and do not register again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease went by accident: get a new one and register again."""

    reason: str


def classify_missing_lease(
    *, draining: bool, history_kept: bool, last_good_age_s: float, ttl_s: float
) -> Revoked | Lost:
    """Why etcd does not know our lease (issue 2, item 6).

    `draining`: our statefile entry says so. `history_kept`: etcd's revision has not gone back, and it knows what we
    wrote. `last_good_age_s`: from when we *sent* the last answered keepalive to when we first heard that the lease
    is missing. So the lease can only have expired if this is at least `ttl_s`.
    """
    if draining:
        return Revoked("the statefile says that this worker drains")
    if not history_kept:
        return Lost("etcd has lost its data")
    if last_good_age_s >= ttl_s:
        return Lost(f"it expired: the last keepalive was {last_good_age_s:.1f} s ago, the TTL is {ttl_s:g} s")
    return Revoked(f"it was alive {last_good_age_s:.1f} s ago, within its TTL of {ttl_s:g} s")


class _State(enum.Enum):
    NEW = "not granted yet"
    HELD = "held"
    LEFT = "given back by us"
    REVOKED = "revoked from outside"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Entry:
    key: Callable[[int], str]
    value: Callable[[int], bytes]


class LeaseKeeper:
    """Grants a lease, keeps it and the keys under it alive, and says when it was revoked.

    `revoked` is set when the lease was taken away from outside. The keeper then does nothing more until `reinstate`
    or `close`. If the lease was lost, a new one is granted, and `on_regrant(new_lease_id)` is awaited (`lease_id` is
    the new one by then). Only then are all keys put again: a caller that sees a key may send at once, so subjects
    must be served first. A callback that raises is tried again, and no key is put until it succeeds.
    """

    def __init__(
        self,
        kv: KeyValueStore,
        *,
        is_draining: Callable[[], Awaitable[bool]],
        on_regrant: Callable[[int], Awaitable[None]] | None = None,
        ttl_s: int = 10,
        clock: Clock | None = None,
    ) -> None:
        self.revoked = asyncio.Event()
        self.lease_id = 0
        self.ttl_s = ttl_s
        self._kv = kv
        self._is_draining = is_draining
        self._on_regrant = on_regrant
        self._clock: Clock = clock or AsyncioClock()
        self._state = _State.NEW
        self._entries: list[_Entry] = []
        self._withdrawn: list[_Entry] = []
        self._lock = asyncio.Lock()
        self._kick = asyncio.Event()
        self._last_good_s = 0.0
        self._missing_age_s: float | None = None
        self._witness: tuple[str | None, int] = (None, 0)
        self._to_tell = False
        self._to_put = False
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    # --- for the worker --------------------------------------------------------------------------

    async def start(self, timeout_s: float = 10.0) -> int:
        """Grant the lease and begin to keep it alive; its id. Raises `EtcdUnavailable` past the timeout."""
        await self._until(timeout_s, self._grant)
        self._keeping = asyncio.create_task(self._keep(), name="lease keepalive")
        return self.lease_id

    async def register(self, key: Callable[[int], str], value: Callable[[int], bytes], timeout_s: float = 10.0) -> None:
        """Put `key(lease_id)` = `value(lease_id)`, now and, once etcd has taken it, under every later lease.

        Raises `EtcdUnavailable` past the timeout: it may be there, as long as this lease is, and is not put again. And
        `LeaseNotFound` if the lease was revoked or given back: it is not there, and will not be.
        """
        await self.register_all([(key, value)], timeout_s)

    async def register_all(
        self, values: Iterable[tuple[Callable[[int], str], Callable[[int], bytes]]], timeout_s: float = 10.0
    ) -> None:
        """`register` of several keys, which come in one revision."""
        entries = [_Entry(key, value) for key, value in values]
        if entries:
            await self._until(timeout_s, lambda: self._put_entries(entries))

    async def withdraw(self, keep: Collection[Callable[[int], str]], timeout_s: float = 5.0) -> None:
        """Remove all keys but those; they are not put again until `restore`. The lease lives on.

        Raises `EtcdUnavailable` past the timeout, and `LeaseNotFound` if the lease was revoked or given back; what was
        not removed by then is not put again either.
        """

        async def remove() -> None:
            async with self._lock:
                if self._state is not _State.HELD:
                    raise LeaseNotFound(f"cannot withdraw keys: the lease is {self._state.value}")
                self._withdrawn = [entry for entry in self._entries if entry.key not in keep]
                for entry in self._withdrawn:
                    kv = await self._kv.get(entry.key(self.lease_id))
                    if kv is not None and kv.lease_id == self.lease_id:
                        await self._kv.delete(kv.key)

        await self._until(timeout_s, remove)

    async def restore(self, timeout_s: float = 5.0) -> None:
        """Put what `withdraw` has removed, all at once. Raises as that does."""

        async def put() -> None:
            async with self._lock:
                if self._state is not _State.HELD:
                    raise LeaseNotFound(f"cannot restore keys: the lease is {self._state.value}")
                await self._put(self._withdrawn)
                self._withdrawn = []

        await self._until(timeout_s, put)

    async def put_again(self, key: Callable[[int], str], timeout_s: float = 5.0) -> None:
        """The value of that registered key has changed. Raises as `register`."""
        entries = [each for each in self._present() if each.key == key]
        if entries:
            await self._until(timeout_s, lambda: self._put_entries(entries))

    async def revoke(self, timeout_s: float = 5.0) -> None:
        """Give the lease back; returns once its keys are gone. Does not set `revoked`; may be called again.

        Raises `EtcdUnavailable` past the timeout: nothing keeps the lease alive any more, so it expires by itself.
        """
        async with self._lock:
            if self._state is _State.HELD:
                self._state = _State.LEFT
            await self._stop_watching()
        await self._until(timeout_s, self._revoke_and_confirm)

    async def reinstate(self, timeout_s: float = 10.0) -> int:
        """After `revoke`, or after it was revoked: a new lease with all keys, as if it had been lost.

        Returns the new lease's id. Raises `EtcdUnavailable` past the timeout."""
        if self._state not in (_State.LEFT, _State.REVOKED):
            return self.lease_id

        async def anew() -> None:
            async with self._lock:
                if self._state is not _State.HELD:
                    await self._regrant()
                await self._settle()

        await self._until(timeout_s, anew)
        log.info("registered again under lease %s", lease_hex(self.lease_id))
        return self.lease_id

    async def close(self) -> None:
        """End the tasks and give the lease back if etcd answers. Closing twice is no error."""
        state, self._state = self._state, _State.CLOSED
        keeping, self._keeping = self._keeping, None
        await ended(keeping)
        await self._stop_watching()
        if state is not _State.HELD:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._kv.revoke(self.lease_id)
        except (EtcdUnavailable, TimeoutError) as error:
            log.warning("lease %s was left to expire: %s", lease_hex(self.lease_id), error)

    # --- steps -----------------------------------------------------------------------------------

    async def _until(self, timeout_s: float, step: Callable[[], Awaitable[None]]) -> None:
        """Try the step until it works. `LeaseNotFound` while we hold a lease is repaired by the keeper: try again."""
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            try:
                return await step()
            except LeaseNotFound as error:
                if self._state is not _State.HELD:
                    raise
                if self._clock.now_s() >= deadline_s:  # not revoked: whoever asked may not take it for that
                    raise EtcdUnavailable(f"the lease was lost, and no other was granted in time: {error}") from error
                self._kick.set()
            except EtcdUnavailable:
                if self._clock.now_s() + RETRY_S >= deadline_s:
                    raise
            await self._clock.sleep_until(min(deadline_s, self._clock.now_s() + RETRY_S))

    async def _grant(self) -> None:
        asked_s = self._clock.now_s()
        lease_id, revision = await together(self._kv.grant(self.ttl_s), self._kv.revision())
        self._witness = (None, revision)
        self.lease_id, self._last_good_s, self._missing_age_s = lease_id, asked_s, None
        self._state = _State.HELD

    async def _regrant(self) -> None:
        await self._grant()
        self._to_tell = self._on_regrant is not None
        self._to_put = True
        self.revoked.clear()

    async def _settle(self) -> None:
        """Do what is still to be done after a re-grant, or after keys vanished. Under the lock."""
        if self._to_tell and self._on_regrant is not None:
            await self._on_regrant(self.lease_id)
            self._to_tell = False
        if self._to_put:
            await self._put(self._present())
            self._to_put = False
            await self._watch_own_key()

    def _present(self) -> list[_Entry]:
        """The keys that are not withdrawn, in the order in which they were first put. That order holds for ever: the
        last key says that the others are there. (Keys that came back behind it made the arbiter drain the last
        worker that could be found. It took the one that was just registering again for ready.)"""
        return [entry for entry in self._entries if entry not in self._withdrawn]

    async def _put_entries(self, entries: Sequence[_Entry]) -> None:
        async with self._lock:
            if self._state is not _State.HELD:
                first = entries[0].key(self.lease_id)
                raise LeaseNotFound(f"cannot register {first}: the lease is {self._state.value}")
            await self._put(entries)
            # Not before: what the keeper puts, `register` would hear of only later.
            self._entries += [entry for entry in entries if entry not in self._entries]
            if self._entries[0] in entries:
                await self._watch_own_key()

    async def _put(self, entries: Sequence[_Entry]) -> None:
        """All at once: whoever sees one of them finds the others."""
        values = {entry.key(self.lease_id): entry.value(self.lease_id) for entry in entries}
        if values:
            revision = await self._kv.put_all(values, self.lease_id)
            if (first := (self._entries or entries)[0]) in entries:
                self._witness = (first.key(self.lease_id), revision)

    async def _revoke_and_confirm(self) -> None:
        await self._kv.revoke(self.lease_id)
        for entry in list(self._entries):
            kv = await self._kv.get(entry.key(self.lease_id))
            if kv is not None and kv.lease_id == self.lease_id:
                raise EtcdUnavailable(f"etcd still has {kv.key} after its lease was revoked")

    # --- keeping it alive ------------------------------------------------------------------------

    async def _keep(self) -> None:
        wait_s = self.ttl_s / KEEPALIVES_PER_TTL
        while True:
            kicked = await self._kicked(wait_s)
            async with self._lock:
                try:
                    wait_s = await self._tick(kicked)
                except DynamoError as error:
                    log.warning("lease %s: %s", lease_hex(self.lease_id), error)
                    wait_s = RETRY_S
                except Exception:
                    log.exception("lease %s: tried again in %g s", lease_hex(self.lease_id), RETRY_S)
                    wait_s = RETRY_S

    async def _kicked(self, wait_s: float) -> bool:
        """Whether a check of the lease was asked for within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._kick.wait()
        except TimeoutError:
            return False
        self._kick.clear()
        return True

    async def _tick(self, kicked: bool) -> float:
        """One keepalive and what follows from it; seconds to the next."""
        interval_s = self.ttl_s / KEEPALIVES_PER_TTL
        if self._state is not _State.HELD:
            return interval_s
        asked_s = self._clock.now_s()
        try:
            async with asyncio.timeout(max(interval_s, 0.5)):
                await self._kv.keepalive(self.lease_id)
        except TimeoutError:
            raise EtcdUnavailable("no answer to a keepalive") from None
        except LeaseNotFound:
            await self._mend(self._clock.now_s())  # not `asked_s`: it may have expired up to this answer
        else:
            self._last_good_s, self._missing_age_s = asked_s, None
            if kicked and await self._own_key_is_gone():
                log.warning(
                    "keys of lease %s were deleted while it lives; putting them again", lease_hex(self.lease_id)
                )
                self._to_put = True
        if self._state is _State.HELD:
            await self._settle()
        return max(RETRY_S, asked_s + interval_s - self._clock.now_s())

    async def _own_key_is_gone(self) -> bool:
        return bool(self._entries) and await self._kv.get(self._entries[0].key(self.lease_id)) is None

    async def _mend(self, now_s: float) -> None:
        """The lease is missing: find out why, and act on it."""
        if self._missing_age_s is None:  # etcd may go away while we ask: the time when it was first missing counts
            self._missing_age_s = now_s - self._last_good_s
        fate = classify_missing_lease(
            draining=await self._draining(),
            history_kept=await self._history_kept(),
            last_good_age_s=self._missing_age_s,
            ttl_s=self.ttl_s,
        )
        log.warning("lease %s is %s: %s", lease_hex(self.lease_id), type(fate).__name__.lower(), fate.reason)
        if isinstance(fate, Revoked):
            self._state = _State.REVOKED
            self.revoked.set()
            await self._stop_watching()
        else:
            await self._regrant()

    async def _draining(self) -> bool:
        try:
            return await self._is_draining()
        except DynamoError as error:
            log.warning("cannot tell from the statefile whether this worker drains: %s", error)
            return False

    async def _history_kept(self) -> bool:
        key, revision = self._witness
        if key is None:
            return await self._kv.revision() >= revision
        # Comparing revisions alone fails when others have registered again before us.
        return await self._kv.remembers(key, revision)

    # --- seeing a revoke at once -----------------------------------------------------------------

    async def _watch_own_key(self) -> None:
        """Watch the first key, so that a revoke is seen within milliseconds and not at the next keepalive."""
        await self._stop_watching()
        if self._entries and self._state is _State.HELD:
            key = self._entries[0].key(self.lease_id)
            self._watching = asyncio.create_task(self._watch(key), name=f"watch {key}")

    async def _stop_watching(self) -> None:
        watching, self._watching = self._watching, None
        await ended(watching)

    async def _watch(self, key: str) -> None:
        async with aclosing(self._kv.watch_prefix(key)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, SnapshotEvent):
                    gone = all(kv.key != key for kv in event.kvs)
                else:
                    gone = isinstance(event, DeleteEvent) and event.key == key
                if gone:
                    self._kick.set()
