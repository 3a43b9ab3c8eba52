"""Give this process another environment: Python's, the C library's, and the one that /proc shows to others.

The kernel shows the memory in which a program's environment was when it began. What a run left behind is found by the
marks in there (`succession.marks`), so a process that becomes another one has to write its new marks into that memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_ARG_START, _ARG_END, _ENV_START, _ENV_END = 45, 46, 47, 48
"""Places in /proc/PID/stat, counted from the first field behind the name."""


class NoRoom(OSError):
    """The memory of the first environment is too small for the marks."""


def become(env: Mapping[str, str], *, marks: Iterable[str], secret: Iterable[str], argv: Iterable[str]) -> None:
    """From now on the environment is `env`, and nothing of the former one is left, in /proc neither.

    /proc shows the variables named in `marks` first, then those that fit; never those named in `secret`. `argv` is
    what it shows as the command line, as far as that fits. Raises `NoRoom` where the marks do not fit; then nothing
    has changed.
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
    room = arg_end - arg_start
    # The last byte has to be zero: else the kernel takes what follows for a part of the command line.
    ctypes.memmove(arg_start, words[: room - 1].ljust(room, b"\0"), room)


def _places() -> tuple[int, int, int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[at]) for at in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
    if not 0 < arg_start < arg_end <= env_start < env_end:
        raise NoRoom("the kernel does not say where this process's environment is")
    return arg_start, arg_end, env_start, env_end


def _shown(env: Mapping[str, str], marks: list[str], secret: frozenset[str], room: int) -> bytes:
    """The memory's new content, `room` bytes."""
    shown = b"".join(_entry(name, env[name]) for name in marks if name in env)
    if len(shown) > room:
        raise NoRoom(f"the marks need {len(shown)} bytes, and there are {room}")
    for name in sorted(env.keys() - set(marks) - secret):
        entry = _entry(name, env[name])
        if len(shown) + len(entry) <= room:
            shown += entry
    return shown.ljust(room, b"\0")


def _entry(name: str, value: str) -> bytes:
    return os.fsencode(f"{name}={value}") + b"\0"
