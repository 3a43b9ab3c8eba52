"""The part of a statefile entry that the worker itself writes: pid, lease, endpoints, and whether it drains.

The entry is for people, and for the arbiter's successor. Nothing waits for it: a slow or full disk must neither
keep a worker in routing nor out of it. Each commit writes the state of its own moment, so one commit covers any number
of changes, and the next one makes up for a failed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import StateError
from dynamo_local.state import State, StateStore
from dynamo_local.system.cancelling import ended

log = logging.getLogger("dynamo_local.worker")

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What a worker knows of itself. `lease` is hex, None while it has none; `draining` is the reason why it drains."""

    pid: int
    lease: str | None
    endpoints: tuple[str, ...]
    draining: str | None
    frontend_url: str | None

    def write(self, state: State, watcher_name: str, *, resumed: bool) -> None:
        """Write it into the worker's entry, if there is one. States that only the arbiter can know are left alone.

        `resumed`: it was draining and has registered again, so `draining` is out of date. Without that it stays: the
        arbiter commits a drain before we hear of it.
        """
        if self.frontend_url is not None:
            state.frontend_url = self.frontend_url
        entry = state.components.get(watcher_name)
        if entry is None or TRAITS[entry.state].gone or entry.pid not in (None, self.pid):
            return  # the entry that its component has kept, or another worker's: its own has another name
        entry.endpoints = []  # first: endpoints under another lease would be invalid
        entry.pid, entry.lease = self.pid, self.lease
        entry.endpoints = list(self.endpoints)
        if self.draining is not None and entry.state in (WorkerState.STARTING, WorkerState.READY):
            entry.state, entry.reason = WorkerState.DRAINING, self.draining
        elif resumed and entry.state is WorkerState.DRAINING:
            entry.state, entry.reason = WorkerState.READY, None


class EntryWriter:
    """Updates the statefile in the background; `truth` gives the entry at each commit."""

    def __init__(self, store: StateStore, watcher_name: str, truth: Callable[[], Entry]) -> None:
        self._store = store
        self._watcher_name = watcher_name
        self._truth = truth
        self._dirty = asyncio.Event()
        self._clean = asyncio.Event()
        self._clean.set()
        self._resumed = False
        self._task: asyncio.Task[None] | None = None

    def touch(self, *, resumed: bool | None = None) -> None:
        """Something changed. `resumed` says (True) or takes back (False) that the worker registered again."""
        if resumed is not None:
            self._resumed = resumed
        self._dirty.set()
        self._clean.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="statefile entry")

    def renamed(self, watcher_name: str) -> None:
        """Its entry has another name from now on."""
        self._watcher_name = watcher_name
        self.touch()

    async def flush(self, timeout_s: float) -> bool:
        """Whether all changes so far were written within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._clean.wait()
        except TimeoutError:
            log.warning("the statefile was not up to date within %g s; going on", timeout_s)
            return False
        return True

    async def close(self) -> None:
        """Stop writing. A commit that is under way in its thread ends by itself."""
        await ended(self._task)

    async def drains(self) -> bool:
        """Whether the file says that this worker drains; False if it cannot be read."""
        try:
            state = await asyncio.to_thread(self._store.read)
        except StateError as error:
            log.warning("cannot tell from the statefile whether this worker drains: %s", error)
            return False
        entry = state.components.get(self._watcher_name)
        return entry is not None and entry.state is WorkerState.DRAINING

    async def _run(self) -> None:
        failing = False
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            resumed, self._resumed = self._resumed, False
            try:
                change = partial(self._truth().write, watcher_name=self._watcher_name, resumed=resumed)
                await self._store.aupdate(change)
            except StateError as error:
                if not failing:
                    log.warning("the statefile was not updated, trying again every %g s: %s", RETRY_S, error)
                failing = True
                self._resumed = self._resumed or (resumed and not self._truth().draining)
                self._dirty.set()
                await asyncio.sleep(RETRY_S)
                continue
            if failing:
                log.info("the statefile is up to date again")
            failing = False
            if not self._dirty.is_set():
                self._clean.set()
