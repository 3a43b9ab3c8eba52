"""Checks the contents of our wheel and sdist: `check_wheel.py DIST_FOLDER`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

MUST = (
    "dynamo_local/state/store.py",
    "dynamo_local/circus_plugins/arbiter.py",
    "dynamo_local/py.typed",
    "dynamo_local/planner/plugins/plugin.binpb",
    "dynamo_local/planner/plugins/plugin.proto",
    "dynamo_local/arbiter/planner_report.js",
    "dynamo_local/dashboard/static/index.html",
    "dynamo_local/dashboard/static/main.js",
    "dynamo_local/dashboard/static/vendor/uplot.js",
    "dynamo_local/dashboard/static/vendor/uplot.LICENSE",
    "dynamo_local/components/text/tiny_tokenizer/tokenizer.json",
)


def main(folder: Path) -> int:
    wheel = next(folder.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    problems = [f"{wheel.name} lacks {name}" for name in MUST if name not in names]
    if top != {"dynamo_local"}:
        problems.append(f"{wheel.name} has top-level names other than dynamo_local: {sorted(top)}")
    if not any("/profile/data/" in name and name.endswith(".npz") for name in names):
        problems.append(f"{wheel.name} lacks the sim engine's profiles")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        sources = sdist.getnames()
    if not any(name.endswith("/state/store.py") for name in sources):
        problems.append("the sdist lacks state/store.py")
    for problem in problems:
        print(problem)
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
