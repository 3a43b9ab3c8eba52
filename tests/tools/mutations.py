"""Ten lines of the fleet and the planner, each changed on its own: does a test notice?

    python -m tests.tools.mutations

Each change is made in a temporary copy of the repository. Exits with 1 if a change survives its tests, and with 2 if
a line is not in the code any more: then choose one that says the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
FLEET, POLICIES = "dynamo_local/core/fleet", "dynamo_local/planner/policies"
MACHINE, RULES = "tests/unit/core/fleet", "tests/unit/planner/policies"


class Mutation(NamedTuple):
    """`line` of the file, which is in it once, becomes `mutated`; one of the `tests` has to fail then."""

    rule: str
    file: str
    line: str
    mutated: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a worker drains before it is killed",
        f"{FLEET}/draining.py",
        "builder.do(Revoke(name, worker.lease, tells=True))",
        "builder.do(EndSession(name, worker.pid or 0))",
        (f"{MACHINE}/test_machine_drains.py", f"{MACHINE}/test_drain_orders.py"),
    ),
    Mutation(
        "a GPU is free only after all processes of its worker are gone",
        f"{FLEET}/starting.py",
        "        _sweep(builder, worker.name)\n    elif not left:",
        "        after_process(builder, worker.name)\n    elif not left:",
        (f"{MACHINE}/test_machine_gpus.py", f"{MACHINE}/test_machine_restarts.py"),
    ),
    Mutation(
        "a GPU that nobody could look at is not free",
        f"{FLEET}/starting.py",
        "if stale is not None or who[uuid] is not None]",
        "if who[uuid] is not None]",
        (f"{MACHINE}/test_machine_gpus.py",),
    ),
    Mutation(
        "the last ready worker stays, also if another one is on its way",
        f"{FLEET}/scaling.py",
        "if ready_left or (not ready and left > 0):",
        "if ready_left or left > 0:",
        (f"{MACHINE}/test_scale_decisions.py", f"{MACHINE}/test_drain_decisions.py"),
    ),
    Mutation(
        "the end of an earlier lease says nothing about the worker",
        f"{FLEET}/observed.py",
        "if worker is not None and worker.runs and worker.lease == seen.lease:",
        "if worker is not None and worker.runs:",
        (f"{MACHINE}/test_machine_registry.py", f"{MACHINE}/test_machine_revokes.py"),
    ),
    Mutation(
        "a worker that failed too often is faulted, at the bound itself",
        f"{FLEET}/backoff.py",
        "if failures >= policy.failures_max:",
        "if failures > policy.failures_max:",
        (f"{MACHINE}/test_restart_policy.py",),
    ),
    Mutation(
        "min_gpu_budget: no worker is taken at the floor",
        f"{POLICIES}/load_rules.py",
        "if side.capacity <= floor:",
        "if side.capacity < floor:",
        (f"{RULES}/test_load_rules.py",),
    ),
    Mutation(
        "max_gpu_budget: no worker is added above it",
        f"{POLICIES}/load_rules.py",
        "if needed <= budget:",
        "if counted <= budget:",
        (f"{RULES}/test_load_rules.py",),
    ),
    Mutation(
        "the grace period of a new decode worker ends at its end",
        f"{POLICIES}/load_rules.py",
        "if side.since_added_s is not None and side.since_added_s < facts.grace_s:",
        "if side.since_added_s is not None and side.since_added_s <= facts.grace_s:",
        (f"{RULES}/test_load_rules.py",),
    ),
    Mutation(
        "a share within the target never falls with another worker",
        "dynamo_local/planner/queueing.py",
        "shares[workers] = min(share if share >= 0 else of(workers, 0.0), shares[workers + 1])",
        "shares[workers] = share if share >= 0 else of(workers, 0.0)",
        ("tests/unit/planner/test_queueing.py",),
    ),
)


def caught(mutation: Mutation, copy: Path) -> bool:
    """Whether its tests fail on the mutated copy. Raises `LookupError` if the line is not in the file once."""
    file = copy / mutation.file
    text = file.read_text("utf-8")
    if text.count(mutation.line) != 1:
        raise LookupError(f"{mutation.file}: {text.count(mutation.line)} lines have {mutation.line!r}")
    file.write_text(text.replace(mutation.line, mutation.mutated), "utf-8")
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not full", *mutation.tests)
    try:
        ended = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, timeout=TIMEOUT_S
        )
    finally:
        file.write_text(text, "utf-8")
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.rule}: pytest ended with {ended.returncode}: {ended.stdout.decode()[-2000:]}")
    return ended.returncode == 1


def main() -> int:
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        # `dynamo_local` has two links to folders beside it.
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        for mutation in MUTATIONS:
            try:
                outcome = "caught" if caught(mutation, copy) else "survived"
            except LookupError as error:
                outcome = f"not found ({error})"
            outcomes.append(outcome)
            print(f"{outcome}: {mutation.rule}", flush=True)
    return 2 if any(each.startswith("not found") for each in outcomes) else int("survived" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
