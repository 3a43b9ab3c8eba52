"""`python -m benchmarks.contest [--facts FILE] [--minutes N] [--only TRACE] [--replay NPZ] [--page]`: judge planners.

Each run is kept in FILE as soon as it is done; the next call goes on where this one ended. Exit code 3: runs are left.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from benchmarks.contest.measuring import CASES, DYNAMOS, Facts, measure_all
from benchmarks.contest.page import PAGE, section, write
from benchmarks.contest.replaying import installed, replay_all
from benchmarks.contest.trials import TRIALS

UNFINISHED = 3


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--facts", type=Path, help="keep each run in this file, and do not repeat those that it has")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--only", action="append", default=[], choices=[trial.name for trial in TRIALS])
    parser.add_argument("--case", action="append", default=[], choices=(*CASES, DYNAMOS), help="only these rows")
    parser.add_argument("--limit", type=int, help="only the first so many requests of each trace")
    parser.add_argument("--replay", type=Path, metavar="NPZ", help="Dynamo's replay alone, with this profile of passes")
    parser.add_argument("--shown", action="store_true", help="run nothing, show what is kept")
    parser.add_argument("--page", action="store_true", help="write it into docs/contest.md")
    options = parser.parse_args()
    facts = Facts.load(options.facts)
    until_s = time.monotonic() + options.minutes * 60
    whole = True
    if options.replay is not None:
        if not installed():
            parser.error("Dynamo's wheels are not installed here: tests/dynamo1x/install.sh VENV")
        whole = replay_all(facts, options.only, options.case, options.replay, options.limit, until_s, _say)
    elif not options.shown:
        whole = measure_all(facts, options.only, options.case, options.limit, until_s, _say)
    print(section(facts))
    if options.page:
        write(PAGE, facts)
    return 0 if whole else UNFINISHED


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
