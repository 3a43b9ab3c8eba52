"""The guardian: a circus plugin in a process of its own that outlives a killed arbiter.

It holds a pidfd on the arbiter, so it knows of its death within milliseconds. The policy then decides. It ends the run:
workers and the processes that they started, their leases, NATS, etcd, statefile, sockets. Or it keeps the run serving
until `dynamo serve --adopt`. Meanwhile it revokes the lease of a worker that dies and ends the processes that the
worker leaves.

An arbiter that leaves in order ends its guardian first.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import time
from pathlib import Path
from typing import Any

from circus.plugins import CircusPlugin
from filelock import FileLock
from tornado.ioloop import IOLoop

from dynamo_local.arbiter import leftovers
from dynamo_local.arbiter.guarded_run import OPTION, GuardedRun, KeptFiles
from dynamo_local.arbiter.leftovers import RecordedProcess, revoke
from dynamo_local.arbiter.marks import marked
from dynamo_local.errors import NamespaceBusy, StateError
from dynamo_local.system import collector
from dynamo_local.system import liveness as living
from dynamo_local.system import liveness as lock
from dynamo_local.system.processes import ended_how, exit_status, is_alive, oom_kills

log = logging.getLogger("dynamo_local.guardian")

LOCK_POLL_S = 0.02
PRELOAD_AFTER_S = 5.0
LOOK_AGAIN_S = 2.0
OOM_LOOK_EVERY_S = 10.0
"""An OOM kill within this time before the arbiter's death may have been the arbiter's."""


class Guardian(CircusPlugin):  # type: ignore[misc]
    """The plugin that circus runs. It ignores circus's events, which may be lost."""

    name = "dynamo-guardian"

    def __init__(self, *args: Any, **config: Any) -> None:
        with collector.keeping():  # everything that it needs while it only watches is imported
            super().__init__(*args, **config)
        self.guarded = GuardedRun.read(Path(config[OPTION]))
        self.files = KeptFiles(Path(file) for file in self.guarded.files)
        self.arbiter_died = False
        self._pidfd: int | None = None
        self._oom_kills = oom_kills()
        self.death = ended_how(None, None, None)

    def handle_init(self) -> None:
        """Watch the arbiter, which may have died before we were up."""
        loop: IOLoop = self.loop
        try:
            self._pidfd = os.pidfd_open(self.guarded.arbiter_pid)
        except ProcessLookupError:
            pass
        # Checked after the pidfd is opened: from then on the pid cannot be reused.
        if self._pidfd is None or not is_alive(self.guarded.arbiter_pid, self.guarded.arbiter_start_time):
            loop.add_callback(self._arbiter_gone)
        else:
            loop.add_handler(self._pidfd, lambda _fd, _events: self._arbiter_gone(), IOLoop.READ)
            loop.call_later(PRELOAD_AFTER_S, _preload)
            loop.call_later(OOM_LOOK_EVERY_S, self._count_oom_kills)
            log.info("watching the arbiter, pid %d; policy: %s", self.guarded.arbiter_pid, self._policy)

    @property
    def _policy(self) -> str:
        return "keep" if self.guarded.keep else "end"

    def _count_oom_kills(self) -> None:
        self._oom_kills = oom_kills()
        self.loop.call_later(OOM_LOOK_EVERY_S, self._count_oom_kills)

    def _arbiter_gone(self) -> None:
        self.arbiter_died = True
        if self._pidfd is not None:
            status = exit_status(self.guarded.arbiter_pid, self._pidfd)
            self.death = ended_how(status, self._oom_kills, oom_kills())
            self.loop.remove_handler(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.loop.stop()

    def handle_recv(self, data: Any) -> None:
        """circus's events are ignored."""

    def start(self) -> None:
        """Wait until the arbiter is gone. Then end the run, or keep it."""
        super().start()  # closes its sockets when the loop is stopped
        if self.arbiter_died:
            log.warning("the arbiter, pid %d, %s; policy: %s", self.guarded.arbiter_pid, self.death, self._policy)
            if self.guarded.keep:
                Keeper(self.guarded, self.files, self.death).run()
            else:
                end_run(self.guarded, self.death)


def _preload() -> None:
    """Import the modules that end a run. Later an import costs 0.1 s, much more on a host in trouble, or fails.

    Not done at the start, when the workers need the processors. It costs 10 MiB.
    """
    importlib.import_module("dynamo_local.state.store")


def end_run(guarded: GuardedRun, death: str) -> None:
    """End what the arbiter left behind, unless a successor has begun to. `death` says how the arbiter ended."""
    held = _take_namespace(guarded)
    if held is None:
        return
    try:
        began_s, wall_s = time.monotonic(), time.time()
        workers = [worker.name for worker in leftovers.recorded(guarded.paths.statefile).workers]
        for what in leftovers.end_run(guarded.paths):
            log.warning("ended %s", what)
        log.info("nothing is left of run %s, after %.3f s", guarded.run_id, time.monotonic() - began_s)
        _record_end(guarded, death, workers, wall_s)
    finally:
        lock.release(held)


def _record_end(guarded: GuardedRun, death: str, workers: list[str], wall_s: float) -> None:
    """For `dynamo events`, and for commands that find nothing. Imported last: a watching guardian stays small."""
    try:
        from dynamo_local.arbiter.event_log import EventLog, ended_in_its_place, event_log_path

        events = EventLog(event_log_path(guarded.paths.logs))
        ended_in_its_place(events, guarded, death, workers, wall_s)
    except (ImportError, OSError, StateError) as error:
        log.warning("the end of the run is not in the event log: %s", error)


def _take_namespace(guarded: GuardedRun) -> FileLock | None:
    """The namespace's lock, or None if another run owns the namespace by now.

    While another command holds it, we wait: `dynamo serve` may still refuse and change nothing. If it takes over, it
    ends us first.
    """
    paths = guarded.paths
    while True:
        try:
            return living.claim(paths, lock.GUARDIAN)
        except NamespaceBusy:
            run = leftovers.recorded(paths.statefile)
        if run.readable and run.run_id != guarded.run_id:
            log.info("run %s has the namespace now", run.run_id)
            return None
        time.sleep(LOCK_POLL_S)


class Keeper:
    """Watches workers that serve without an arbiter, and the files that they and the next arbiter need.

    It leaves the statefile to the next arbiter.
    """

    def __init__(self, guarded: GuardedRun, files: KeptFiles, death: str) -> None:
        self._guarded = guarded
        self._death = death
        self._files = files
        self._poll = select.poll()
        self._watched: dict[int, RecordedProcess] = {}
        self._seen: set[RecordedProcess] = set()

    def run(self) -> None:
        """Return when no worker is left, unless a new arbiter ends us before."""
        while True:
            run = leftovers.recorded(self._guarded.paths.statefile)
            if run.readable and run.run_id != self._guarded.run_id:
                log.info("run %s has the namespace now", run.run_id)
                return
            if run.readable:
                self._restore_files()
            for worker in run.workers:
                # A worker without a start time is just being started: it cannot be told from another process yet.
                if worker.started_s is not None and worker not in self._seen:
                    self._seen.add(worker)
                    self._watch(worker, run)
            starting = not self._watched and any(found.is_worker for found in marked(self._guarded.paths))
            if not self._watched and not starting:
                log.warning("no worker lives any more: nothing is left to keep")
                end_run(self._guarded, self._death)
                return
            for fd, _ in self._poll.poll(LOOK_AGAIN_S * 1000):
                self._ended(fd, leftovers.recorded(self._guarded.paths.statefile))

    def _restore_files(self) -> None:
        try:
            for path in self._files.restore():
                log.warning("%s was removed while no arbiter lives; made again", path)
        except OSError as error:  # tried again at the next look
            log.warning("what is missing of %s cannot be made again: %s", self._guarded.runtime, error)

    def _watch(self, worker: RecordedProcess, run: leftovers.RecordedRun) -> None:
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

    def _ended(self, fd: int, run: leftovers.RecordedRun) -> None:
        worker = self._watched.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        self._clean_up_after(worker, run)

    def _clean_up_after(self, worker: RecordedProcess, run: leftovers.RecordedRun) -> None:
        log.warning("%s (pid %d) has ended, and is started again when the run is adopted", worker.name, worker.pid)
        revoke(run.etcd_endpoints, run.certificates, run.leases.get(worker.name, ()))
        for what in leftovers.end_sessions([worker]):
            log.warning("ended %s, which it left behind", what)
