"""Where the time of a Frontend and of a worker goes, as flame graphs: `python -m benchmarks.flames FOLDER [--as NAME]`.

py-spy (extra: bench) looks at the processes 200 times a second while they answer requests of one token, then while they
stream. It writes `requests-frontend-NAME.svg`, `requests-worker-NAME.svg` and the same of `tokens`: open them in a
browser, click on a frame to enlarge it. Another version of the product is looked at where `PYTHONPATH` leads to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.beside import Side
from benchmarks.deployment import served
from benchmarks.frontend import CONNECTIONS, FAST, PACED, config, two_cores

SECONDS = 12
RATE_HZ = 200
PARTS = {"frontend": "Frontend", "worker": "VllmWorker"}


def main() -> None:
    """Both loads, both processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flames", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--as", dest="name", default="now", help="the end of the files' names (now)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    loads: dict[str, tuple[dict[str, object], Callable[[Side], object]]] = {
        "requests": (FAST, lambda side: side.asked(1000, 1, CONNECTIONS)),
        "tokens": (PACED, lambda side: side.asked(64, 200, 64)),
    }
    with two_cores():
        for load, (sim, ask) in loads.items():
            with served("graphs.agg:Frontend", config(sim, {})) as graph:
                side = Side(graph, "sim-tiny")
                ask(side)  # warm
                files = {part: options.folder / f"{load}-{part}-{options.name}.svg" for part in PARTS}
                with recorded({graph.pids()[PARTS[part]]: file for part, file in files.items()}) as running:
                    while running():
                        ask(side)
                for file in files.values():
                    print(file)


@contextmanager
def recorded(files: dict[int, Path]) -> Iterator[Callable[[], bool]]:
    """Each process of these pids into a file; the function says whether it is still being looked at."""
    spies = [subprocess.Popen(_words(pid, file), stdout=subprocess.DEVNULL) for pid, file in files.items()]
    try:
        yield lambda: all(spy.poll() is None for spy in spies)
        for spy in spies:
            if spy.wait(timeout=60) != 0:
                sys.exit("py-spy could not look at the process: see above (it may need CAP_SYS_PTRACE)")
    finally:
        for spy in spies:
            spy.kill()


def _words(pid: int, file: Path) -> list[str]:
    program = str(Path(sys.executable).with_name("py-spy"))
    return [program, "record", "--pid", str(pid), "-o", str(file), "-d", str(SECONDS), "-r", str(RATE_HZ), "--function"]


if __name__ == "__main__":
    main()
