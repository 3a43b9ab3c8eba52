"""A fleet as a value, and the real `Statefile` that keeps it, in a file that is in memory."""

from __future__ import annotations

import threading

from dynamo_local.arbiter.statefile import Statefile
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.state.schema import State
from tests.fakes.arbiter.fleet_views import fleet
from tests.fakes.arbiter.memory_store import MemoryFile, MemoryStore
from tests.fakes.arbiter.told import Told
from tests.simulation.world import factory_for, graph

SOON_S = 5.0


class KeptFleet:
    """`fleet` is what the arbiter has in memory; a test replaces it. Writes wait while `disk` is not set."""

    def __init__(self, *workers: str) -> None:
        self.fleet = fleet(*workers)
        self.file = MemoryFile()
        self.told = Told()
        self.disk = threading.Event()
        self.disk.set()
        self.reached = threading.Event()
        """A write has come to the disk."""
        self.store = MemoryStore(self.file, on_write=self._on_write)
        factory = factory_for(graph(decode=1, prefill=1, big=False), "01J")
        head = State(namespace="dynamo", run_id="01J", circus_endpoint="ipc:///memory/ctl.sock")
        self.statefile = Statefile(head, self.store, factory.launch_of, self.told)

    def now(self) -> Fleet:
        return self.fleet

    def _on_write(self, when: str) -> None:
        if when == "before":
            self.reached.set()
            if not self.disk.wait(SOON_S):
                raise AssertionError("nobody let the write go on")
