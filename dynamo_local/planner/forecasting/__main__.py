"""The process that forecasts: `python -m dynamo_local.planner.forecasting`, with a socket as its standard input.

It reads tasks and answers each, until the other side closes the socket; the kernel kills it when its parent dies. It
gives way to all who serve: for the processor, and when memory runs out.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from dynamo_local.system.prctl import die_as_asked

NICE = 5
STDIN = 0


def main() -> None:
    """See the module."""
    die_as_asked(os.environ)
    os.nice(NICE)
    with suppress(OSError):  # a container may not let us
        Path("/proc/self/oom_score_adj").write_text("1000")
    logging.disable(logging.CRITICAL)  # Stan tells of each fit
    # Children of the libraries must not inherit the socket: standard input becomes /dev/null.
    with socket.socket(fileno=os.dup(STDIN)) as connection:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), STDIN)
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    from dynamo_local.planner.forecasting.answers import answer
    from dynamo_local.planner.forecasting.process import framed, read_task

    with connection.makefile("rb") as incoming, suppress(BrokenPipeError, ConnectionResetError):
        while (task := read_task(incoming)) is not None:
            connection.sendall(framed(answer(task)))


if __name__ == "__main__":
    main()
