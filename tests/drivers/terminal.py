"""`dynamo serve` on a terminal that a test closes, as a person closes a window."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable

from tests.drivers.served import POLL_S, START_TIMEOUT_S, Served, until


def serve_on_terminal(served: Served) -> tuple[subprocess.Popen[str], Callable[[], None]]:
    """The process, once its graph is ready, and what closes its terminal."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_local.cli.main", *served.serve_words()],
        cwd=served.cwd,
        env=served.env,
        text=True,
        preexec_fn=lambda: os.login_tty(theirs),
        pass_fds=(theirs,),
    )
    os.close(theirs)
    closing = threading.Event()
    reader = threading.Thread(target=_drain, args=(ours, closing), daemon=True)
    reader.start()

    def close() -> None:
        closing.set()
        reader.join()
        os.close(ours)

    until(lambda: served.cli_status().get("state") == "ready", START_TIMEOUT_S)
    return process, close


def _drain(terminal: int, closing: threading.Event) -> None:
    while not closing.is_set():
        if select.select([terminal], [], [], POLL_S)[0]:
            os.read(terminal, 65536)
