"""The guardian: a circus plugin, in a process of its own, that outlives a killed arbiter and does what is to be done.

It holds a pidfd on the arbiter, so it knows within milliseconds. By policy it then *ends* the run (workers and all
that they started, their leases, NATS, etcd, statefile, sockets), or *keeps* it serving until `dynamo serve --adopt`
comes: meanwhile it revokes the lease of a worker that dies, and ends what that worker leaves behind.

An arbiter that leaves in order ends its guardian before itself: then nothing is left to be done.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from circus.plugins import CircusPlugin
from filelock import FileLock
from tornado.ioloop import IOLoop

from dynamo_local.errors import NamespaceBusy
from dynamo_local.serve import leftovers, lock
from dynamo_local.serve.leftovers import Known
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.processes import is_alive

log = logging.getLogger("dynamo_local.guardian")

OPTION = "ward"
"""The plugin's one option: the path of a `Ward`'s file. circus passes options through an unquoted command line."""
LOCK_POLL_S = 0.02
PRELOAD_AFTER_S = 5.0
LOOK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Ward:
    """What a guardian watches: an arbiter (started so many seconds after boot), and what it would leave behind."""

    namespace: str
    run_id: str
    runtime: str
    statefile: str
    logs: str
    arbiter_pid: int
    arbiter_start_time: float
    keep: bool

    def write(self, path: Path) -> None:
        """As a file for the guardian to read, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Ward:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))

    @property
    def paths(self) -> Paths:
        """Of its namespace."""
        return Paths(self.namespace, Path(self.runtime), Path(self.statefile), Path(self.logs))


class Guardian(CircusPlugin):  # type: ignore[misc]
    """See the module. Nothing that comes over circus's endpoint matters to it: events may be lost."""

    name = "dynamo-guardian"

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.ward = Ward.read(Path(config[OPTION]))
        self.arbiter_died = False
        self._pidfd: int | None = None

    def handle_init(self) -> None:
        """Watch the arbiter; it may have died before we were up."""
        loop: IOLoop = self.loop
        try:
            self._pidfd = os.pidfd_open(self.ward.arbiter_pid)
        except ProcessLookupError:
            pass
        # Only after the pidfd is held can the number not be given to somebody else any more.
        if self._pidfd is None or not is_alive(self.ward.arbiter_pid, self.ward.arbiter_start_time):
            loop.add_callback(self._arbiter_gone)
        else:
            loop.add_handler(self._pidfd, lambda _fd, _events: self._arbiter_gone(), IOLoop.READ)
            loop.call_later(PRELOAD_AFTER_S, _preload)
            log.info("watching the arbiter, pid %d; policy: %s", self.ward.arbiter_pid, self._policy)

    @property
    def _policy(self) -> str:
        return "keep" if self.ward.keep else "end"

    def _arbiter_gone(self) -> None:
        self.arbiter_died = True
        if self._pidfd is not None:
            self.loop.remove_handler(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.loop.stop()

    def handle_recv(self, data: Any) -> None:
        """Nothing."""

    def start(self) -> None:
        """Until the arbiter is gone; then do what is to be done."""
        super().start()  # closes its sockets when the loop is stopped
        if self.arbiter_died:
            log.warning("the arbiter, pid %d, is gone; policy: %s", self.ward.arbiter_pid, self._policy)
            if self.ward.keep:
                Keeper(self.ward).run()
            else:
                end_run(self.ward)


def _preload() -> None:
    """What is needed at the end: an import then costs 0.1 s (much more on a host in trouble), or cannot be had at all.

    Not at the start, when the workers need the processors. It costs 10 MiB.
    """
    importlib.import_module("dynamo_local.state.store")


def end_run(ward: Ward) -> None:
    """End what the arbiter left behind, unless a successor has begun to."""
    held = _take_namespace(ward)
    if held is None:
        return
    try:
        began_s = time.monotonic()
        for what in leftovers.end_run(ward.paths):
            log.warning("ended %s", what)
        log.info("nothing is left of run %s, after %.3f s", ward.run_id, time.monotonic() - began_s)
    finally:
        lock.release(held)


def _take_namespace(ward: Ward) -> FileLock | None:
    """The namespace's lock. None once somebody else has made the run his own.

    While another command holds it, we wait: `dynamo serve` may yet refuse, and leave all as it is. If it takes over,
    it ends us first.
    """
    paths = ward.paths
    while True:
        try:
            return lock.acquire(paths.lock, ward.namespace, lock.GUARDIAN)
        except NamespaceBusy:
            run = leftovers.recorded(paths.statefile)
        if run.readable and run.run_id != ward.run_id:
            log.info("run %s has the namespace now", run.run_id)
            return None
        time.sleep(LOCK_POLL_S)


class Keeper:
    """Watches workers that serve without an arbiter. It changes nothing in the statefile: that is its successor's."""

    def __init__(self, ward: Ward) -> None:
        self._ward = ward
        self._poll = select.poll()
        self._watched: dict[int, Known] = {}
        self._seen: set[Known] = set()

    def run(self) -> None:
        """Until nothing is left to keep, or a successor ends us."""
        while True:
            run = leftovers.recorded(self._ward.paths.statefile)
            if run.readable and run.run_id != self._ward.run_id:
                log.info("run %s has the namespace now", run.run_id)
                return
            for worker in run.workers:
                # One without a start time is just being made: nothing tells it from a stranger yet.
                if worker.started_s is not None and worker not in self._seen:
                    self._seen.add(worker)
                    self._watch(worker, run)
            starting = not self._watched and any(found.is_worker for found in leftovers.marked(self._ward.paths))
            if not self._watched and not starting:
                log.warning("no worker lives any more: nothing is left to keep")
                end_run(self._ward)
                return
            for fd, _ in self._poll.poll(LOOK_AGAIN_S * 1000):
                self._ended(fd, leftovers.recorded(self._ward.paths.statefile))

    def _watch(self, worker: Known, run: leftovers.Recorded) -> None:
        try:
            fd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            self._clean_up_after(worker, run)
            return
        if worker.alive:
            self._watched[fd] = worker
            self._poll.register(fd, select.POLLIN)
        else:
            os.close(fd)
            self._clean_up_after(worker, run)

    def _ended(self, fd: int, run: leftovers.Recorded) -> None:
        worker = self._watched.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        self._clean_up_after(worker, run)

    def _clean_up_after(self, worker: Known, run: leftovers.Recorded) -> None:
        log.warning("%s (pid %d) has ended; it is started again when the run is adopted", worker.name, worker.pid)
        leftovers.revoke(run.etcd_endpoints, run.leases.get(worker.name, ()))
        for what in leftovers.end_sessions([worker]):
            log.warning("ended %s, which it left behind", what)
