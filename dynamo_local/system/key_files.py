"""API keys as this process holds them: read at the start, and again whenever their file has changed."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dynamo_local.core.secrets import BYTES_MAX, KeySet, KeySource, parse_keys
from dynamo_local.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

Seen = tuple[int, int, int]
"""The state of a file: inode, size, time of its last change (ns)."""


class ApiKeys:
    """The keys of one source.

    A file is looked at once a second while `follow` runs. One that has become unreadable, empty or readable to others
    changes nothing: the last good keys stay, and the log says why. So half a rotation locks nobody out.
    """

    def __init__(self, source: KeySource, keys: KeySet, seen: Seen | None = None) -> None:
        self._source = source
        self._keys = keys
        self._seen = seen

    @classmethod
    def load(cls, source: KeySource, environ: Mapping[str, str], *, option: str) -> ApiKeys:
        """Read them. `option` (`Frontend.api-key`) begins the message of a `ConfigError`; no message has a key."""
        try:
            if source.kind == "env":
                if source.name not in environ:
                    raise ValueError("is not set")
                return cls(source, parse_keys(environ[source.name], source))
            return cls(source, *_read(source))
        except ValueError as error:
            what = "the variable" if source.kind == "env" else "the file"
            raise ConfigError(f"{option}: {what} {source.name} {error}") from None

    def accepts(self, key: bytes) -> bool:
        """Whether a client that shows it may come in."""
        return self._keys.accepts(key)

    async def follow(self) -> None:
        """Read the file again each time it has changed, for ever; returns at once where the keys are a variable's."""
        logged = ""
        while self._source.kind == "file":
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                if await asyncio.to_thread(_look, self._source.name) == self._seen:
                    continue
                self._keys, self._seen = await asyncio.to_thread(_read, self._source)
            except ValueError as error:
                if str(error) != logged:
                    log.error("API keys: the file %s %s; the keys of before stay valid", self._source.name, error)
                    logged = str(error)
            else:
                logged = ""
                log.info("API keys: %s has changed and now has %d keys", self._source.name, len(self._keys.digests))


def _look(path: str) -> Seen:
    try:
        return _seen(os.stat(path))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def _seen(info: os.stat_result) -> Seen:
    return info.st_ino, info.st_size, info.st_mtime_ns


def _read(source: KeySource) -> tuple[KeySet, Seen]:
    """Raises `ValueError`, without any of what is in it."""
    try:
        # Without blocking: a FIFO of that name would wait for a writer for ever.
        with os.fdopen(os.open(Path(source.name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("is no plain file")
            if info.st_mode & stat.S_IROTH:
                raise ValueError("can be read by everybody on this host: `chmod 600` it")
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(data) > BYTES_MAX:
        raise ValueError(f"is larger than {BYTES_MAX} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    return parse_keys(text, source), _seen(info)
