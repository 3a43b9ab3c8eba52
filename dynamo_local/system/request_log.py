"""The `x-request-id` of the request that the running task works on, and its place in the log.

A request enters a process through the Frontend's middleware, an endpoint, or an entry of the prefill queue. The id is
bound there, once. Tasks that are started below inherit it (contextvars), and code that sends the request on reads it
here. Every log line that is written meanwhile begins with it:

    2026-11-22 05:24:47,417 INFO dynamo_local.components.decode: [order-4711] request …: Remote prefill: True …

No code here runs per token. A line that is not written costs nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Final

HEADER: Final = "x-request-id"

MAX_LENGTH: Final = 128
MAX_TEXT: Final = 1000

_FIT_FOR_LOGS = re.compile(rf"[!-~]{{1,{MAX_LENGTH}}}")
"""Printable ASCII without spaces: no line breaks and no control characters, in a header or in a log line."""

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"

_bound: contextvars.ContextVar[str] = contextvars.ContextVar("dynamo_x_request_id", default="")


def accept_or_make(given: str) -> str:
    """The client's id where it is printable ASCII without spaces and at most `MAX_LENGTH` long, else a new one."""
    return given if _FIT_FOR_LOGS.fullmatch(given) else uuid.uuid4().hex


def fit_for_logs(text: str) -> str:
    """One line of at most `MAX_TEXT` characters, whatever a client has put into it: nobody writes lines of ours."""
    line = text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:MAX_TEXT])
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]}…"


def x_request_id() -> str:
    """The id of the request that this task works on; empty outside a request."""
    return _bound.get()


@contextlib.contextmanager
def bound(x_request_id: str) -> Iterator[None]:
    """Within the block, and in tasks that it starts, this is the request's id.

    An id that is not fit for a log line, from whoever speaks our wire format, counts as none.
    """
    token = _bound.set(x_request_id if _FIT_FOR_LOGS.fullmatch(x_request_id) else "")
    try:
        yield
    finally:
        _bound.reset(token)


def unbound() -> contextlib.AbstractContextManager[None]:
    """For a task that a request starts and that outlives it, such as a watch: its log lines belong to no request."""
    return bound("")


class RequestIdFilter(logging.Filter):
    """Gives each record a `request`: the bound id in brackets and a space, or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        x_request_id = _bound.get()
        record.request = f"[{x_request_id}] " if x_request_id else ""
        return True


class OncePerSecond(logging.Formatter):
    """`logging.Formatter`, which would make the date of each line anew."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self._second = -1
        self._date = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """The local date and time, with milliseconds."""
        second = int(record.created)
        if second != self._second:
            self._second, self._date = second, time.strftime(self.default_time_format, time.localtime(second))
        return f"{self._date},{int(record.msecs):03d}"


def log_to_stderr(level: str) -> None:
    """Set up a worker process's log: everything from `level` on goes to stderr in `FORMAT`."""
    # Fields that FORMAT does not show are not computed for each line (Python's logging howto, "Optimization"). The
    # process's id stays: vLLM's own format wants a number there, and each line would become a traceback.
    logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[attr-defined]
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(OncePerSecond(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    # A package behind vLLM's API sets the root logger to ERROR when it is imported: ours keep their own level.
    logging.getLogger("dynamo_local").setLevel(level)
