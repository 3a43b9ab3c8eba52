"""A process that has done everything ends, whatever Python still waits for.

Python waits at its exit for cancelled tasks, for threads and for libraries (gRPC among them), and has no bound for any
of these. A worker that had left in order would be taken for hung, and `dynamo down` would wait for its arbiter.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import threading
import time
import traceback

log = logging.getLogger(__name__)

END_WITHIN_S = 10.0
"""An exit takes some tens of milliseconds, and a second on a busy host."""


def end_at_the_latest(code: int, within_s: float = END_WITHIN_S) -> None:
    """Have this process end with `code` after `within_s` seconds, should it still be there: its log then says what it
    waited for. To be called once all that must be done is done, in the thread of the event loop if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    # A daemon: threads that are none are what Python may be waiting for.
    threading.Thread(target=_end, args=(code, within_s, loop), name="end at the latest", daemon=True).start()


def end_now(code: int) -> None:
    """End the process without waiting. Logged and printed text is written first."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(code: int, within_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
    time.sleep(within_s)
    log.error("still there %g s after the end of its work, so it ends now. Left behind:\n%s", within_s, _left(loop))
    end_now(code)


def _left(loop: asyncio.AbstractEventLoop | None) -> str:
    """The stacks of all threads but this one, and of the tasks that have not ended."""
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, stack in sys._current_frames().items():
        if ident != threading.get_ident():
            text.write(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(stack))}")
    for task in asyncio.all_tasks(loop) if loop is not None and not loop.is_closed() else ():
        text.write(f"task {task.get_name()}:\n")
        task.print_stack(file=text)
    return text.getvalue()
