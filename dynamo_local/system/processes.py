"""Linux processes: identity, death signals, pidfds, sessions.

circus knows only pids. A pid is reused, so a pid and a start time identify a process. A signal to a process does not
reach its grandchildren, so signals go to sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dynamo_local.system.executors import SWEEPS, CallOverdue

log = logging.getLogger(__name__)

END_SESSION_DEADLINE_S = 5.0
"""Deadline for reading all of /proc, which takes tens of milliseconds on a busy host."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the name may hold spaces and parentheses


def start_time_s(pid: int) -> float | None:
    """Seconds since boot at which the process started; None if there is no such process (or a zombie)."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] == "Z":
        return None
    return int(fields[19]) / _TICKS_PER_S


_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info` of linux/pidfd.h in its first version: mask, cgroup, eleven ids, exit code."""


def exit_status(pid: int, pidfd: int) -> int | None:
    """The wait status of an ended process that need not be our child; None if the kernel does not tell.

    A zombie shows it in /proc. Once its parent has waited for it, a pidfd tells it from Linux 6.15 on.
    """
    fields = _stat_fields(pid)
    if fields is not None and fields[0] == "Z":
        return int(fields[49])
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(answer)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def oom_kills() -> int | None:
    """How many processes of this host the kernel's OOM killer has killed since boot; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def ended_how(status: int | None, oom_before: int | None, oom_after: int | None) -> str:
    """`was killed by SIGKILL`: a wait status in words, with the OOM killer where it was at work meanwhile."""
    if status is None:
        how = "was killed (by what is not known)"
    elif os.WIFSIGNALED(status):
        how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        return f"ended with exit code {os.waitstatus_to_exitcode(status)}"
    by_oom = status is None or os.WTERMSIG(status) == signal.SIGKILL
    if by_oom and oom_before is not None and oom_after is not None and oom_after > oom_before:
        how += ", while the kernel's OOM killer was at work (`dmesg` names its victims)"
    return how


def parent_and_session(pid: int) -> tuple[int, int] | None:
    """The parent's pid and the session's id; None if there is no such process."""
    fields = _stat_fields(pid)
    return None if fields is None else (int(fields[1]), int(fields[3]))


def cpu_s(pid: int) -> float:
    """Processor time so far of it, and of children of its that have ended; 0 if it is gone."""
    fields = _stat_fields(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:15])) / _TICKS_PER_S


def family_of(*pids: int) -> set[int]:
    """Those and all who descend from them, or are in a session of theirs. Reads all of /proc once."""
    parents = {
        int(entry): found
        for entry in os.listdir("/proc")
        if entry.isdigit() and (found := parent_and_session(int(entry))) is not None
    }
    family = {pid for pid in pids if pid in parents}
    while more := {pid for pid, of in parents.items() if pid not in family and not family.isdisjoint(of)}:
        family |= more
    return family


def age_s(pid: int) -> float:
    """How many seconds it has run; 0 if it is gone. Changes of the wall clock do not affect it."""
    started_s = start_time_s(pid)
    return 0.0 if started_s is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def is_alive(pid: int, started_s: float | None = None) -> bool:
    """The process runs, is no zombie and (where given) is still the one that started then."""
    found = start_time_s(pid)
    return found is not None and (started_s is None or abs(found - started_s) < 0.011)


def session_members(session: int) -> Iterator[int]:
    """Pids whose session is `session`, zombies left out."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat_fields(int(entry))
            if fields is not None and fields[0] != "Z" and int(fields[3]) == session:
                yield int(entry)


def sessions() -> dict[int, dict[int, float]]:
    """Session id -> its members' pids, each with its start time (seconds since boot). Reads all of /proc once."""
    found: dict[int, dict[int, float]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))) is not None and fields[0] != "Z":
            found.setdefault(int(fields[3]), {})[int(entry)] = int(fields[19]) / _TICKS_PER_S
    return found


def is_resource_tracker(pid: int) -> bool:
    """Python's own helper, which removes shared memory and semaphores once all processes that share them are dead.

    Killed with those, it would leave `psm_*` and `sem.mp-*` in /dev/shm until the next boot.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_session(session: int, signum: int = signal.SIGKILL) -> list[int]:
    """Signal every member of the session; returns the pids that were there.

    circus's own escalation missed 4 of 6 grandchildren in a trial. The session contains all. A resource tracker ends by
    itself.
    """
    hit = []
    for pid in session_members(session):
        if signum == signal.SIGKILL and is_resource_tracker(pid):
            continue
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue
        hit.append(pid)
    return hit


async def aend_session(session: int, *, deadline_s: float = END_SESSION_DEADLINE_S) -> list[int]:
    """SIGKILL every member of the session. Returns the pids that were found.

    `kill_session` for an event loop: a thread reads /proc. If /proc hangs, because a process hangs in the kernel, the
    leader and its process group are killed after `deadline_s`. Never raises for that.
    """
    try:
        return await SWEEPS.run(lambda: kill_session(session), deadline_s, what=f"looking for session {session}")
    except CallOverdue as error:
        log.warning("%s: only its leader and its process group are killed", error)
    hit = []
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(session, signal.SIGKILL)
            hit.append(session)
    return hit[:1]


async def wait_exit(pid: int, timeout_s: float | None = None) -> bool:
    """True once the process is gone (zombie counts), False past the timeout. Sees it within milliseconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(timeout_s):  # wait_for swallows a cancellation that comes with the exit (< 3.12)
            await gone.wait()
    except TimeoutError:
        return False
    else:
        return True
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def send_signal(pid: int, signum: signal.Signals) -> None:
    """To the main process only (the group would break an engine's drain); one that left a moment ago is no error."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        log.debug("pid %d was gone before %s", pid, signum.name)


# Replaces this process's environment: Python's, the C library's, and the one that /proc shows to others.
#
# The kernel shows the memory that held the program's environment at its start. Leftovers of a run are found by the
# marks in it (`arbiter.marks`). So a process that becomes another worker writes its new marks into that memory.

_ARG_START, _ARG_END, _ENV_START, _ENV_END = 45, 46, 47, 48
"""Places in /proc/PID/stat, counted from the first field behind the name."""


class EnvironmentTooLarge(OSError):
    """The memory of the first environment is too small for the marks."""


def become(env: Mapping[str, str], *, marks: Iterable[str], secret: Iterable[str], argv: Iterable[str]) -> None:
    """From now on the environment is `env`, and nothing of the former one is left, in /proc neither.

    /proc shows the variables named in `marks` first, then those that fit; never those named in `secret`. `argv` is
    what it shows as the command line, as far as that fits. Raises `EnvironmentTooLarge` if the marks do not fit: then
    nothing has changed.
    """
    arg_start, arg_end, env_start, env_end = _places()
    shown = _shown(env, list(marks), frozenset(secret), env_end - env_start)
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    # All of them, also those that stay as they are: `putenv` copies, and the C library must not look at the memory
    # that is overwritten next.
    os.environ.update(env)
    ctypes.memmove(env_start, shown, env_end - env_start)
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    size = arg_end - arg_start
    # The last byte has to be zero: else the kernel takes what follows for a part of the command line.
    ctypes.memmove(arg_start, words[: size - 1].ljust(size, b"\0"), size)


def _places() -> tuple[int, int, int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[at]) for at in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
    if not 0 < arg_start < arg_end <= env_start < env_end:
        raise EnvironmentTooLarge("the kernel does not say where this process's environment is")
    return arg_start, arg_end, env_start, env_end


def _shown(env: Mapping[str, str], marks: list[str], secret: frozenset[str], size: int) -> bytes:
    """The memory's new content, `room` bytes."""
    shown = b"".join(_entry(name, env[name]) for name in marks if name in env)
    if len(shown) > size:
        raise EnvironmentTooLarge(f"the marks need {len(shown)} bytes, and there are {size}")
    for name in sorted(env.keys() - set(marks) - secret):
        entry = _entry(name, env[name])
        if len(shown) + len(entry) <= size:
            shown += entry
    return shown.ljust(size, b"\0")


def _entry(name: str, value: str) -> bytes:
    return os.fsencode(f"{name}={value}") + b"\0"
