"""The sum of several pytest runs: `total.py FOLDER EXIT_CODE SECONDS`, where each run left a JUnit file in the folder.

Beside them may lie what `side_by_side.py` wrote of its commands. The failed tests stand by name before the last line,
because an excerpt of a long log shows its end only. The last line is like pytest's own. An exit code that no failed
test explains (of a lint, say) is an error in it.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = ("failed", "passed", "skipped", "error")
LINES_OF_A_FAILURE = 12


def counts_of(run: str, report: ElementTree.Element) -> tuple[Counter[str], float]:
    """Tests by outcome, and the seconds that the run took."""
    suite = report.find("testsuite")
    assert suite is not None, f"{run}.xml is no report of pytest"
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = number["tests"] - number["failures"] - number["errors"] - number["skipped"]
    found = Counter(failed=number["failures"], passed=passed, skipped=number["skipped"], error=number["errors"])
    return found, float(suite.get("time", 0.0))


def failures_of(run: str, report: ElementTree.Element) -> Iterator[str]:
    """The name of each failed test, and the last lines of pytest's traceback, where the assertion stands."""
    for case in report.iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            said = (problem.text or problem.get("message") or "").strip().splitlines()[-LINES_OF_A_FAILURE:]
            yield "\n    ".join([f"{problem.tag} in {run}: {case.get('classname')}::{case.get('name')}", *said])


def words(counts: Counter[str]) -> str:
    """`1 failed, 20 passed`: what is not there is not named."""
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "no tests ran"


def main(arguments: Sequence[str]) -> int:
    """Print a line per run and the total; the exit code is the one that was given, or 1 where no test ran."""
    folder, code, seconds = Path(arguments[0]), int(arguments[1]), float(arguments[2])
    total: Counter[str] = Counter()
    reports = {file.stem: ElementTree.parse(file).getroot() for file in sorted(folder.glob("*.xml"))}
    for run, report in reports.items():
        counts, took_s = counts_of(run, report)
        total += counts
        print(f"{run}: {words(counts)} in {took_s:.0f} s")
    for file in sorted(folder.glob("*.times")):
        print(f"{file.stem}, command by command:\n{file.read_text(encoding='utf-8')}", end="")
    if code and not total["failed"] and not total["error"]:
        print(f"tox ended with exit code {code}; what failed is above, and is no test")
        total["error"] += 1
    for run, report in reports.items():
        for failure in failures_of(run, report):
            print(failure)
    minutes, rest = divmod(round(seconds), 60)
    print(f"=== {words(total)} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest:02}) ===")
    return code or (0 if total["passed"] else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
