"""`python -m benchmarks.mixes [--sizes NAME,…] [--families NAME,…] [--seeds N,…]`: all policies on mixes of models.

Constants of the decision are chosen on odd seeds and reported on even ones (`--seeds even`), or the other way round.
Recorded mixes need traces (`DYN_TRACES` names their folder). Where there are none, this is said, and they are left out.
Exit code 2: an option is wrong; 3: mixes are left, because `--minutes` are over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path

from benchmarks.mixes.judge import Row, Task, judged_task, table
from benchmarks.mixes.made import FAMILIES, RECORDED, SIZES, recorded
from dynamo_local.system.executors import process_pool

UNFINISHED = 3
SEEDS = {"even": tuple(range(2, 21, 2)), "odd": tuple(range(1, 20, 2))}
PROCESSES = 2


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="with commas: models and GPUs, such as '12 on 8'")
    parser.add_argument("--families", default=",".join((*FAMILIES, RECORDED)), help="with commas")
    parser.add_argument("--seeds", default="even", help="even or odd (ten each), or numbers with commas")
    parser.add_argument("--at", type=float, help="judge at this load factor, and look for no largest one")
    parser.add_argument("--minutes", type=float, help="begin no mix after so long")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many mixes at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    families, sizes = options.families.split(","), options.sizes.split(",")
    if unknown := [*(set(families) - {*FAMILIES, RECORDED}), *(set(sizes) - set(SIZES))]:
        parser.error(f"there is no {unknown[0]}; there are {', '.join((*FAMILIES, RECORDED, *SIZES))}")
    seeds = SEEDS.get(options.seeds) or tuple(map(int, options.seeds.split(",")))
    if RECORDED in families and not recorded():
        print("no recorded traces are here; DYN_TRACES names their folder", file=sys.stderr)
        families.remove(RECORDED)
    tasks = [(family, size, seed, options.at) for seed in seeds for family in families for size in sizes]
    rows, left = _measured(tasks, options.processes, options.minutes, options.json)
    print(table(rows))
    if left:
        print(f"{left} mixes are left", file=sys.stderr)
    return UNFINISHED if left else 0


def _measured(tasks: Sequence[Task], processes: int, minutes: float | None, kept: Path | None) -> tuple[list[Row], int]:
    """The rows, and how many mixes are left. The rows so far are written to the file `kept`."""
    began_s, rows, done = time.monotonic(), list[Row](), 0
    with process_pool(processes) as pool:
        running = [pool.submit(judged_task, task) for task in tasks]
        for future in as_completed(running):
            if future.cancelled():
                continue
            found = future.result()
            rows += found
            done += 1
            said = ", ".join(f"{row.policy} {row.load:.2f} ({row.share:.1%})" for row in found)
            print(f"{done}/{len(tasks)}: {found[0].family} {found[0].size} {found[0].seed}: {said}", file=sys.stderr)
            if kept is not None:
                kept.write_text(json.dumps([row.to_dict() for row in rows], indent=1), encoding="utf-8")
            if minutes is not None and time.monotonic() - began_s > minutes * 60:
                for waiting in running:
                    waiting.cancel()
    return rows, len(tasks) - done


if __name__ == "__main__":
    sys.exit(main())
