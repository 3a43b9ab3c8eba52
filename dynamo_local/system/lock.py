"""One arbiter per namespace: a kernel lock held for the arbiter's whole life.

Two arbiters on one control socket silently steal from each other (circus-facts); the lock is taken before
anything is bound, and the kernel frees it within a millisecond when its holder is killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from dynamo_local.errors import NamespaceBusy

GUARDIAN = "the guardian, ending what a killed arbiter left behind"
"""How a guardian at work describes itself."""
GUARDIAN_PATIENCE_S = 15.0
PROBED_S = 0.1
"""Asking whether the lock is held takes it for a moment: wait this long before refusing."""
_POLL_S = 0.02


def _info_file(lock: Path) -> Path:
    return lock.with_suffix(".owner")


def acquire(lock: Path, namespace: str, what: str) -> FileLock:
    """Take the namespace or raise `NamespaceBusy`, which says who runs it. `what` describes us to others.

    A guardian at work is waited for: it is done in a moment.
    """
    held = FileLock(lock, mode=0o600)
    if not _acquired(held, PROBED_S):
        patience_s = GUARDIAN_PATIENCE_S if GUARDIAN in holder(lock) and what != GUARDIAN else 0.0
        if not _acquired(held, patience_s):
            raise busy(namespace, holder(lock))
    try:
        _info_file(lock).write_text(f"pid {os.getpid()} ({what})")
    except OSError:
        release(held)
        raise
    return held


def busy(namespace: str, holder: str) -> NamespaceBusy:
    """The refusal where `holder` runs the namespace."""
    return NamespaceBusy(
        f"namespace {namespace!r} is run by {holder}; use `dynamo status -n {namespace}`, "
        f"`dynamo down -n {namespace}`, or another --namespace"
    )


def _acquired(held: FileLock, timeout_s: float) -> bool:
    try:
        held.acquire(timeout=timeout_s, poll_interval=_POLL_S)
    except Timeout:
        return False
    return True


def release(held: FileLock) -> None:
    """Give the namespace back; the owner's text goes first, so that nobody reads a dead owner's."""
    _info_file(Path(held.lock_file)).unlink(missing_ok=True)
    held.release()


def holder(lock: Path) -> str:
    """Who holds the lock, in words."""
    try:
        return _info_file(lock).read_text() or "another process"
    except FileNotFoundError:
        return "another process"


def is_held(lock: Path) -> bool:
    """True while an arbiter lives. Leaves nothing behind."""
    if not lock.exists():
        return False
    probe = FileLock(lock, mode=0o600)
    try:
        probe.acquire(timeout=0)
    except Timeout:
        return True
    probe.release()
    return False
