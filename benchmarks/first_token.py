"""From the command to ready, and to the first streamed token over HTTP, with embedded etcd and NATS.

The example's disaggregated graph: Frontend, Processor, one decode and one prefill worker on simulated GPUs.
The clock starts before the process of `dynamo serve` is made. Ready is when the command says so (its line in the
foreground, its return with `--detach`). The token is the first with text of one chat, asked for right then. Byte
code and page cache are warm: the first round is not counted.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from benchmarks.deployment import DOWN_TIMEOUT_S, EXAMPLE, Folders, down, first_token, folders
from benchmarks.deployment import run as dynamo
from benchmarks.harness import Report, at_most
from benchmarks.processes import dynamo_command

TARGET_S = 5.0
MODEL = "sim-tiny"
SERVE = ("serve", "graphs.disagg:Frontend", "-f", "configs/disagg.yaml", "--Frontend.port=0")


def run(short: bool) -> Report:
    """Seconds from the command, in the foreground and detached, in turn."""
    report = Report("first_token")
    foreground()
    rounds = [(foreground(), detached()) for _ in range(1 if short else 5)]
    for n, way in enumerate(("foreground", "--detach")):
        report.add(f"{way}: command to ready", "s", (times[n][0] for times in rounds))
        report.add(f"{way}: command to first token", "s", (times[n][1] for times in rounds), at_most(TARGET_S))
    return report


def detached() -> tuple[float, float]:
    """Seconds to the return of `dynamo serve --detach`, and to the first token."""
    with folders() as place:
        begin_s = time.perf_counter()
        try:
            said = dynamo(place, *SERVE, "--detach")
            ready_s = time.perf_counter()
            token_s = first_token(_port(said.splitlines()[-1]), MODEL)
        finally:
            down(place)
    return ready_s - begin_s, token_s - begin_s


def foreground() -> tuple[float, float]:
    """Seconds to the line `ready: …` of `dynamo serve`, and to the first token."""
    with folders() as place:
        begin_s = time.perf_counter()
        with _serving(place) as next_line:
            while not (line := next_line()).startswith("ready:"):
                continue
            ready_s = time.perf_counter()
            token_s = first_token(_port(line), MODEL)
    return ready_s - begin_s, token_s - begin_s


@contextmanager
def _serving(place: Folders) -> Iterator[Callable[[], str]]:
    """`dynamo serve` in the foreground; gives its output line by line. Left by SIGINT, as by Ctrl-C."""
    with (
        (place.root / "errors").open("w+") as errors,
        subprocess.Popen(
            dynamo_command(*SERVE), cwd=EXAMPLE, env=place.env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        output = process.stdout

        def next_line() -> str:
            if line := output.readline():
                return line
            errors.seek(0)
            raise RuntimeError(f"dynamo serve ended before it was ready: {errors.read().strip()}")

        try:
            yield next_line
        finally:
            # Nobody may be left to read: a full pipe would hold up its leaving.
            reader = threading.Thread(target=_drop, args=(output,), daemon=True)
            reader.start()
            process.send_signal(signal.SIGINT)
            process.wait(DOWN_TIMEOUT_S)
            reader.join(DOWN_TIMEOUT_S)


def _drop(stream: IO[str]) -> None:
    for _ in stream:
        continue


def _port(line: str) -> int:
    """From `ready: http://127.0.0.1:41234 …`."""
    return int(line.split()[1].rpartition(":")[2])
