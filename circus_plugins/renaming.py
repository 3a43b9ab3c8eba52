"""A watcher of our arbiter under another name: circus itself has no word for that."""

from __future__ import annotations

import time
from typing import Any


def rename(arbiter: Any, was: str, name: str, pid: int) -> bool:
    """The watcher `was` is called `name` from now on, in the place of one of that name that has no process. False, and
    nothing is changed, where its process is not `pid` (any more).

    Who listens to circus's events hears the old name's `remove` and the new one's `add`.
    """
    watchers = arbiter._watchers_names
    watcher = watchers.get(was.lower())
    if watcher is None or watcher.pid != pid:
        return False
    del watchers[was.lower()]
    former = watchers.pop(name.lower(), None)
    if former is not None:
        arbiter.watchers.remove(former)
    watcher.notify_event("remove", {"time": time.time()})
    watcher.name, watcher.res_name = name, name.lower()
    for process in watcher.processes.values():
        process.name = name
    watchers[name.lower()] = watcher
    watcher.notify_event("add", {"time": time.time()})
    return True
