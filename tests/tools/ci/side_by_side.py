"""Commands side by side: `side_by_side.py [--times FILE] --lane COMMAND… --then COMMAND… --lane COMMAND…`.

The commands of a lane run one after the other, also after a failure. Lanes run at the same time. The first lane has our
priority and mostly waits; the others run below it, on the processor time that is left. The first lane's output is shown
at once, the others' output at each command's end, so that nothing is mixed.

At the end there is a line per command with its seconds, also in the file. The exit code is that of one that failed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NICER = 5
"""A third of the processor time of the first lane where both want it."""
STOP_S = 20.0
SHOWN = 60
"""Characters of a command in the table."""


@dataclass(slots=True)
class Lane:
    """Commands in order, and what became of those that ran: `(command, seconds, exit code)`."""

    commands: list[list[str]]
    first: bool
    done: list[tuple[str, float, int]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    stopped: bool = False

    def run(self, printing: threading.Lock) -> None:
        for command in self.commands:
            if self.stopped:
                return
            began_s, words = time.monotonic(), shlex.join(command)
            out = None if self.first else subprocess.PIPE
            niced = command if self.first else ["nice", "-n", str(NICER), *command]
            self.process = subprocess.Popen(niced, stdout=out, stderr=subprocess.STDOUT if out else None, text=True)
            told, _ = self.process.communicate()
            self.done.append((words, time.monotonic() - began_s, self.process.returncode))
            if told is not None:
                with printing:
                    print(f"--- {words}\n{told}", end="", flush=True)

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()


def split(words: Sequence[str], at: str) -> Iterator[list[str]]:
    """The words between those; none that is empty."""
    part: list[str] = []
    for word in (*words, at):
        if word != at:
            part.append(word)
        elif part:
            yield part
            part = []


def short(words: str) -> str:
    """As much of a command as the table has room for: its beginning and its end."""
    return words if len(words) <= SHOWN else f"{words[: SHOWN // 3]} … {words[-(SHOWN - SHOWN // 3 - 3) :]}"


def main(words: Sequence[str]) -> int:
    """Run the lanes; 130 after Ctrl-C, when all have ended."""
    times = None
    if words[:1] == ["--times"] and len(words) > 1:
        times, words = Path(words[1]), words[2:]
    lanes = [Lane(list(split(lane, "--then")), first=number == 0) for number, lane in enumerate(split(words, "--lane"))]
    if not lanes:
        print(f"nothing to run; usage: {(__doc__ or '').splitlines()[0]}", file=sys.stderr)
        return 2
    printing = threading.Lock()
    threads = [threading.Thread(target=lane.run, args=(printing,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    interrupted = False
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        interrupted = True
        for lane in lanes:
            lane.stop()
        for thread in threads:
            thread.join(STOP_S)
    table = [
        f"{seconds:6.0f} s  lane {number}, exit code {code}: {short(command)}\n"
        for number, lane in enumerate(lanes, 1)
        for command, seconds, code in lane.done
    ]
    print("".join(table), end="", flush=True)
    if times is not None:
        times.parent.mkdir(parents=True, exist_ok=True)
        times.write_text("".join(table), encoding="utf-8")
    if interrupted:
        return 130
    return next((code if code > 0 else 128 - code for lane in lanes for _, _, code in lane.done if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
