"""`python -m benchmarks.regret [--families NAME,…] [--seeds N] [--policies NAME,…]`: regret of planners on made loads.

Exit code 0: all was measured; 1: a family has a higher regret than `--most`; 2: an option is wrong; 3: loads are left,
because `--minutes` are over. Runs are kept in `build/regret`, so a second call goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path

from benchmarks.contest.replaying import installed
from benchmarks.regret.families import EVEN, FAMILIES, ODD, RECORDED, recorded
from benchmarks.regret.report import POLICIES, WARM_UP_S, Task, Verdict, as_json, run_task, say, table
from dynamo_local.errors import BadInput
from dynamo_local.system.executors import process_pool

FOLDER = Path(__file__).parents[2] / "build" / "regret"
TOO_HIGH, UNFINISHED = 1, 3
PROCESSES = 2
HALVES = {"odd": ODD, "even": EVEN, "all": tuple(FAMILIES)}


def main() -> int:
    """See the module."""
    parser = _parser()
    options = parser.parse_args()
    try:
        tasks = list(_tasks(options))
    except BadInput as error:
        parser.error(str(error))
    verdicts, left = _measure(tasks, options)
    verdicts.sort(key=lambda each: (each.family, each.seed, each.policy, each.since_s))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(verdicts), indent=1), encoding="utf-8")
    print(table(verdicts))
    if left:
        say(f"{left} loads are left")
        return UNFINISHED
    high = [each for each in verdicts if options.most is not None and each.regret > options.most]
    for each in sorted(high, key=lambda each: -each.regret):
        say(f"{each.family} {each.seed}, {each.policy}, from {each.since_s:g} s on: regret {each.regret:+.1%}")
    return TOO_HIGH if high else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret", description=(__doc__ or "").split("\n")[0])
    names = f"odd, even, all, {RECORDED}, {', '.join(FAMILIES)}"
    parser.add_argument("--families", default="all", help=f"with commas: {names}")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="loads of each family: the seeds 0 to N−1")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="begin with that seed")
    parser.add_argument("--policies", default="slo,fixed", help=f"with commas: {', '.join(POLICIES)}")
    parser.add_argument("--replay", action="store_true", help="judge in Dynamo's replay, where its wheels are")
    parser.add_argument("--hours", type=float, help="length of each trace; by default drawn between 2.5 and 3.5")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S / 3600, metavar="HOURS", help="counted apart")
    parser.add_argument("--most", type=float, help="the highest regret that is allowed, such as 0.03")
    parser.add_argument("--minutes", type=float, help="begin no load after so long")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many loads at once")
    parser.add_argument("--kept", type=Path, default=FOLDER, metavar="FOLDER", help="where runs are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict on each load there")
    parser.add_argument("--verbose", action="store_true", help="tell of each run")
    return parser


def _tasks(options: argparse.Namespace) -> Iterator[Task]:
    policies = tuple(options.policies.split(","))
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise BadInput(f"no policy is called {unknown[0]}; there are {', '.join(POLICIES)}")
    families = [family for word in options.families.split(",") for family in HALVES.get(word, (word,))]
    if unknown := [family for family in families if family not in (*FAMILIES, RECORDED)]:
        raise BadInput(f"no family is called {unknown[0]}; there are {', '.join((*FAMILIES, RECORDED))}")
    if options.replay and not installed():
        raise BadInput("Dynamo's wheels are not installed here: tests/dynamo1x/install.sh VENV")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    loads = [(family, seed, options.hours) for seed in seeds for family in families if family != RECORDED]
    if RECORDED in families:
        traces = recorded()
        if not traces:
            say("there are no recorded traces here; DYN_TRACES names their folder")
        loads += [(RECORDED, number, None) for number in range(len(traces))]
    for load in loads:
        yield Task(*load, policies, options.kept, options.warm_up * 3600, options.verbose, options.replay)


def _measure(tasks: Sequence[Task], options: argparse.Namespace) -> tuple[list[Verdict], int]:
    """The verdicts on the loads that were judged, and how many loads are left."""
    began_s, found, done = time.monotonic(), list[Verdict](), 0
    until_s = None if options.minutes is None else began_s + options.minutes * 60
    with process_pool(options.processes) as pool:
        running = {pool.submit(run_task, task): task for task in tasks}
        for future in as_completed(running):
            if future.cancelled():
                continue
            task, verdicts = running[future], future.result()
            found += verdicts
            done += 1
            took = f"{done}/{len(tasks)} after {time.monotonic() - began_s:.0f} s"
            say(f"{took}: {task.family} {task.seed}: {'; '.join(map(_said, verdicts))}")
            if until_s is not None and time.monotonic() > until_s:
                for waiting in running:
                    waiting.cancel()
    return found, len(tasks) - done


def _said(verdict: Verdict) -> str:
    since = f" after {verdict.since_s / 3600:g} h" if verdict.since_s else ""
    return f"{verdict.policy}{since} {verdict.share:.2%} @ {verdict.gpu_hours:.2f}, regret {verdict.regret:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
